-- iterations: one row for each completed iteration. An iteration that was computed again after a
-- crash stands once for each attempt.
CREATE TABLE IF NOT EXISTS iterations (
    position BIGINT,
    job VARCHAR,
    attempt VARCHAR,
    iteration BIGINT,
    schedule VARCHAR,
    ended_ns BIGINT,
    wall_s DOUBLE,
    samples_verified BIGINT,
    device_s DOUBLE,
    reward_mean DOUBLE,
    policy_version BIGINT,
    policy_fingerprint VARCHAR,
    moves_committed BIGINT,
    busy_s MAP(VARCHAR, DOUBLE),
    stall_s MAP(VARCHAR, DOUBLE)
);

INSERT INTO iterations
SELECT
    position,
    job,
    body ->> '$.attempt',
    whole_at(body, '$.iteration'),
    body ->> '$.schedule',
    occurred_ns,
    number_at(body, '$.wall_s'),
    whole_at(body, '$.samples_verified'),
    number_at(body, '$.device_s'),
    number_at(body, '$.reward_mean'),
    whole_at(body, '$.policy_version'),
    body ->> '$.policy_fingerprint',
    whole_at(body, '$.moves_committed'),
    map_from_entries(list_transform(
        map_entries(components),
        lambda entry: struct_pack(key := entry.key, value := number_at(entry.value, '$.busy_s'))
    )),
    map_from_entries(list_transform(
        map_entries(components),
        lambda entry: struct_pack(key := entry.key, value := number_at(entry.value, '$.stall_s'))
    ))
FROM (
    SELECT *, TRY_CAST(body -> '$.components' AS MAP(VARCHAR, JSON)) AS components
    FROM fresh
    WHERE type = 'IterationCompleted'
)
ORDER BY position;
