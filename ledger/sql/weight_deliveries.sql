-- weight_deliveries: one row for each target of each weight sync.
CREATE TABLE IF NOT EXISTS weight_deliveries (
    position BIGINT,
    job VARCHAR,
    operation VARCHAR,
    version BIGINT,
    target VARCHAR,
    incarnation VARCHAR,
    outcome VARCHAR,
    reason VARCHAR,
    encoding VARCHAR,
    transport VARCHAR,
    fingerprint_of VARCHAR,
    root VARCHAR,
    differing BIGINT,
    nan BIGINT,
    moved_bytes BIGINT,
    full_bytes BIGINT,
    sync_s DOUBLE,
    started_ns BIGINT,
    delivered_ns BIGINT
);

DELETE FROM weight_deliveries
WHERE (job, operation) IN (SELECT job, operation FROM continued);

INSERT INTO weight_deliveries
WITH asked AS (
    SELECT
        job,
        operation,
        started_position,
        TRY_CAST(said.version AS BIGINT) AS version,
        started_ns,
        unnest(said.targets) AS target
    FROM (
        SELECT
            job,
            operation,
            position AS started_position,
            occurred_ns AS started_ns,
            json_transform(body, '{"version": "VARCHAR", "targets": ["VARCHAR"]}') AS said
        FROM steps
        WHERE type = 'WeightSyncStarted'
    )
),

-- An engine may take a version twice, the first having come damaged: the last counts.
came AS (
    SELECT *, said.target AS target
    FROM (
        SELECT
            job,
            operation,
            position,
            occurred_ns,
            json_transform(
                body,
                '{"target": "VARCHAR", "incarnation": "VARCHAR", "encoding": "VARCHAR",
                  "transport": "VARCHAR", "fingerprint_of": "VARCHAR", "root": "VARCHAR",
                  "differing": "JSON", "nan": "VARCHAR", "moved_bytes": "VARCHAR",
                  "full_bytes": "VARCHAR", "sync_s": "VARCHAR"}'
            ) AS said
        FROM steps
        WHERE type = 'WeightSyncDelivered'
    )
    QUALIFY row_number() OVER (
        PARTITION BY job, operation, said.target ORDER BY position DESC
    ) = 1
),

ended AS (
    SELECT
        job,
        operation,
        outcome.target AS target,
        outcome.outcome AS outcome,
        outcome.reason AS reason
    FROM (
        SELECT
            job,
            operation,
            unnest(TRY_CAST(
                body -> '$.outcomes' AS STRUCT(target VARCHAR, outcome VARCHAR, reason VARCHAR)[]
            )) AS outcome
        FROM steps
        WHERE type = 'WeightSyncCommitted'
    )
),

failed AS (
    SELECT job, operation, 'failed' AS outcome, body ->> '$.reason' AS reason
    FROM steps
    WHERE type = 'WeightSyncFailed'
)

SELECT
    came.position,
    asked.job,
    asked.operation,
    asked.version,
    asked.target,
    came.said.incarnation,
    coalesce(ended.outcome, failed.outcome),
    coalesce(ended.reason, failed.reason),
    came.said.encoding,
    came.said.transport,
    came.said.fingerprint_of,
    came.said.root,
    json_array_length(came.said.differing),
    TRY_CAST(came.said.nan AS BIGINT),
    TRY_CAST(came.said.moved_bytes AS BIGINT),
    TRY_CAST(came.said.full_bytes AS BIGINT),
    TRY_CAST(came.said.sync_s AS DOUBLE),
    asked.started_ns,
    came.occurred_ns
FROM asked
LEFT JOIN came USING (job, operation, target)
LEFT JOIN ended USING (job, operation, target)
LEFT JOIN failed USING (job, operation)
ORDER BY asked.started_position, asked.target;
