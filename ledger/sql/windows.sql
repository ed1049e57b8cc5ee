-- windows: one row for each component of each telemetry window that a decision used.
CREATE TABLE IF NOT EXISTS windows (
    position BIGINT,
    job VARCHAR,
    attempt VARCHAR,
    iteration BIGINT,
    start_ns BIGINT,
    window_s DOUBLE,
    component VARCHAR,
    replicas BIGINT,
    throughput DOUBLE,
    queue BIGINT,
    running BIGINT,
    waiting BIGINT,
    busy_share DOUBLE,
    kv_use DOUBLE,
    prefix_hit_rate DOUBLE,
    remaining BIGINT
);

INSERT INTO windows
SELECT
    position,
    job,
    body ->> '$.attempt',
    whole_at(body, '$.iteration'),
    whole_at(body, '$.start_ns'),
    number_at(body, '$.window_s'),
    entry.key,
    whole_at(entry.value, '$.replicas'),
    number_at(entry.value, '$.throughput'),
    whole_at(entry.value, '$.queue'),
    whole_at(entry.value, '$.running'),
    whole_at(entry.value, '$.waiting'),
    number_at(entry.value, '$.busy_share'),
    number_at(entry.value, '$.kv_use'),
    number_at(entry.value, '$.prefix_hit_rate'),
    whole_at(entry.value, '$.remaining')
FROM (
    SELECT
        *,
        unnest(map_entries(TRY_CAST(body -> '$.components' AS MAP(VARCHAR, JSON)))) AS entry
    FROM fresh
    WHERE type = 'WindowObserved'
)
ORDER BY position, entry.key;
