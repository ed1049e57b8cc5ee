-- Components of fresh windows, before the table takes them in. One pass over the body: one for each
-- number would cost many times as much.
SELECT
    position,
    job,
    attempt,
    TRY_CAST(iteration AS BIGINT) AS iteration,
    TRY_CAST(start_ns AS BIGINT) AS start_ns,
    TRY_CAST(window_s AS DOUBLE) AS window_s,
    entry.key AS component,
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
        seen.attempt,
        seen.iteration,
        seen.start_ns,
        seen.window_s,
        unnest(map_entries(seen.components)) AS entry
    FROM (
        SELECT
            position,
            job,
            json_transform(
                body,
                '{"attempt": "VARCHAR", "iteration": "VARCHAR", "start_ns": "VARCHAR", '
                || '"window_s": "VARCHAR", "components": "MAP(VARCHAR, STRUCT('
                || 'replicas BIGINT, throughput DOUBLE, queue BIGINT, running BIGINT, '
                || 'waiting BIGINT, busy_share DOUBLE, kv_use DOUBLE, prefix_hit_rate DOUBLE, '
                || 'remaining BIGINT))"}'
            ) AS seen
        FROM fresh
        WHERE type = 'WindowObserved'
    )
)
