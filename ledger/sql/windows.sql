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

-- One pass over the body: a cast for each number would cost three times as much.
INSERT INTO windows
SELECT
    position,
    job,
    attempt,
    iteration,
    start_ns,
    window_s,
    entry.key,
    entry.value.replicas,
    entry.value.throughput,
    entry.value.queue,
    entry.value.running,
    entry.value.waiting,
    entry.value.busy_share,
    entry.value.kv_use,
    entry.value.prefix_hit_rate,
    entry.value.remaining
FROM (
    SELECT
        position,
        job,
        body ->> '$.attempt' AS attempt,
        whole_at(body, '$.iteration') AS iteration,
        whole_at(body, '$.start_ns') AS start_ns,
        number_at(body, '$.window_s') AS window_s,
        unnest(map_entries(json_transform(
            body -> '$.components',
            '"MAP(VARCHAR, STRUCT(' || array_to_string([
                'replicas BIGINT', 'throughput DOUBLE', 'queue BIGINT', 'running BIGINT',
                'waiting BIGINT', 'busy_share DOUBLE', 'kv_use DOUBLE',
                'prefix_hit_rate DOUBLE', 'remaining BIGINT'
            ], ', ') || '))"'
        ))) AS entry
    FROM fresh
    WHERE type = 'WindowObserved'
)
ORDER BY position, entry.key;
