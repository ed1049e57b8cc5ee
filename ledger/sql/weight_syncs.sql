-- weight_syncs: one row for each delivery of a policy version to engines.
CREATE TABLE IF NOT EXISTS weight_syncs (
    position BIGINT,
    job VARCHAR,
    attempt VARCHAR,
    operation VARCHAR,
    status VARCHAR,
    version BIGINT,
    base_version BIGINT,
    encoding VARCHAR,
    targets VARCHAR[],
    delivered BIGINT,
    serving BIGINT,
    differing BIGINT,
    moved_bytes BIGINT,
    full_bytes BIGINT,
    sync_s DOUBLE,
    stall_s DOUBLE,
    source_root VARCHAR,
    started_ns BIGINT,
    closed_ns BIGINT,
    reason VARCHAR
);

DELETE FROM weight_syncs WHERE (job, operation) IN (SELECT job, operation FROM continued);

INSERT INTO weight_syncs
WITH folded AS (
    SELECT
        job,
        operation,
        min(position) FILTER (WHERE type = 'WeightSyncStarted') AS position,
        min(occurred_ns) FILTER (WHERE type = 'WeightSyncStarted') AS started_ns,
        max(occurred_ns) FILTER (WHERE type IN ('WeightSyncCommitted', 'WeightSyncFailed'))
            AS closed_ns,
        any_value(body) FILTER (WHERE type = 'WeightSyncStarted') AS started,
        any_value(body) FILTER (WHERE type = 'WeightSyncCommitted') AS committed,
        any_value(body) FILTER (WHERE type = 'WeightSyncFailed') AS failed,
        count(*) FILTER (WHERE type = 'WeightSyncDelivered') AS delivered,
        count(*) FILTER (WHERE json_array_length(came.differing) > 0) AS differing,
        sum(TRY_CAST(came.moved_bytes AS BIGINT)) AS moved_bytes,
        sum(TRY_CAST(came.full_bytes AS BIGINT)) AS full_bytes,
        max(TRY_CAST(came.sync_s AS DOUBLE)) AS sync_s
    FROM (
        SELECT
            *,
            json_transform(
                CASE WHEN type = 'WeightSyncDelivered' THEN body END,
                '{"differing": "JSON", "moved_bytes": "VARCHAR", "full_bytes": "VARCHAR",
                  "sync_s": "VARCHAR"}'
            ) AS came
        FROM steps
        WHERE type IN (
            'WeightSyncStarted', 'WeightSyncDelivered', 'WeightSyncCommitted', 'WeightSyncFailed'
        )
    )
    GROUP BY job, operation
)

SELECT
    position,
    job,
    started.attempt,
    operation,
    CASE
        WHEN committed IS NOT NULL THEN 'committed'
        WHEN failed IS NOT NULL THEN 'failed'
        ELSE 'started'
    END,
    TRY_CAST(started.version AS BIGINT),
    TRY_CAST(started.base_version AS BIGINT),
    started.encoding,
    started.targets,
    delivered,
    len(list_filter(
        TRY_CAST(committed -> '$.outcomes' AS STRUCT(outcome VARCHAR)[]),
        lambda target: target.outcome = 'serving'
    )),
    differing,
    moved_bytes,
    full_bytes,
    sync_s,
    number_at(committed, '$.stall_s'),
    started.source_root,
    started_ns,
    closed_ns,
    failed ->> '$.reason'
FROM (
    SELECT
        * EXCLUDE (started),
        json_transform(
            started,
            '{"attempt": "VARCHAR", "version": "VARCHAR", "base_version": "VARCHAR",
              "encoding": "VARCHAR", "targets": ["VARCHAR"], "source_root": "VARCHAR"}'
        ) AS started
    FROM folded
    WHERE started IS NOT NULL
)
ORDER BY position;
