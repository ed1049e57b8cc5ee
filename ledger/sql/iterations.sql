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

-- Each body is taken apart in one pass; see reallocations.sql.
INSERT INTO iterations
SELECT
    position,
    job,
    said.attempt,
    TRY_CAST(said.iteration AS BIGINT),
    said.schedule,
    occurred_ns,
    TRY_CAST(said.wall_s AS DOUBLE),
    TRY_CAST(said.samples_verified AS BIGINT),
    TRY_CAST(said.device_s AS DOUBLE),
    TRY_CAST(said.reward_mean AS DOUBLE),
    TRY_CAST(said.policy_version AS BIGINT),
    said.policy_fingerprint,
    TRY_CAST(said.moves_committed AS BIGINT),
    map_from_entries(list_transform(
        map_entries(said.components),
        lambda entry: struct_pack(
            key := entry.key, value := TRY_CAST(entry.value.busy_s AS DOUBLE)
        )
    )),
    map_from_entries(list_transform(
        map_entries(said.components),
        lambda entry: struct_pack(
            key := entry.key, value := TRY_CAST(entry.value.stall_s AS DOUBLE)
        )
    ))
FROM (
    SELECT
        position,
        job,
        occurred_ns,
        json_transform(
            body,
            '{"attempt": "VARCHAR", "iteration": "VARCHAR", "schedule": "VARCHAR",
              "wall_s": "VARCHAR", "samples_verified": "VARCHAR", "device_s": "VARCHAR",
              "reward_mean": "VARCHAR", "policy_version": "VARCHAR",
              "policy_fingerprint": "VARCHAR", "moves_committed": "VARCHAR",
              "components": "MAP(VARCHAR, STRUCT(busy_s VARCHAR, stall_s VARCHAR))"}'
        ) AS said
    FROM fresh
    WHERE type = 'IterationCompleted'
)
ORDER BY position;
