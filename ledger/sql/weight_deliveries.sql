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
        position AS started_position,
        whole_at(body, '$.version') AS version,
        occurred_ns AS started_ns,
        unnest(list_at(body, '$.targets')) AS target
    FROM steps
    WHERE type = 'WeightSyncStarted'
),

-- An engine may take a version twice, the first having come damaged: the last counts.
came AS (
    SELECT *, body ->> '$.target' AS target
    FROM steps
    WHERE type = 'WeightSyncDelivered'
    QUALIFY row_number() OVER (
        PARTITION BY job, operation, body ->> '$.target' ORDER BY position DESC
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
    came.body ->> '$.incarnation',
    coalesce(ended.outcome, failed.outcome),
    coalesce(ended.reason, failed.reason),
    came.body ->> '$.encoding',
    came.body ->> '$.transport',
    came.body ->> '$.fingerprint_of',
    came.body ->> '$.root',
    json_array_length(came.body -> '$.differing'),
    whole_at(came.body, '$.nan'),
    whole_at(came.body, '$.moved_bytes'),
    whole_at(came.body, '$.full_bytes'),
    number_at(came.body, '$.sync_s'),
    asked.started_ns,
    came.occurred_ns
FROM asked
LEFT JOIN came USING (job, operation, target)
LEFT JOIN ended USING (job, operation, target)
LEFT JOIN failed USING (job, operation)
ORDER BY asked.started_position, asked.target;
