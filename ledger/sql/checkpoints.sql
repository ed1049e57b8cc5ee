-- checkpoints: one row for each bundle that was saved, registered or restored.
CREATE TABLE IF NOT EXISTS checkpoints (
    position BIGINT,
    job VARCHAR,
    attempt VARCHAR,
    act VARCHAR,
    kind VARCHAR,
    bundle VARCHAR,
    parent VARCHAR,
    path VARCHAR,
    iteration BIGINT,
    policy_version BIGINT,
    cursor BIGINT,
    bytes BIGINT,
    duration_s DOUBLE,
    recorded_ns BIGINT,
    parts MAP(VARCHAR, VARCHAR)
);

-- Each body is taken apart in one pass; see reallocations.sql.
INSERT INTO checkpoints
SELECT
    position,
    job,
    said.attempt,
    CASE type
        WHEN 'CheckpointSaved' THEN 'saved'
        WHEN 'CheckpointRegistered' THEN 'registered'
        ELSE 'restored'
    END,
    coalesce(said.kind, said.form),
    said.bundle,
    said.parent,
    said.path,
    TRY_CAST(said.iteration AS BIGINT),
    TRY_CAST(said.policy_version AS BIGINT),
    TRY_CAST(said.cursor AS BIGINT),
    TRY_CAST(said.bytes AS BIGINT),
    coalesce(
        TRY_CAST(said.save_s AS DOUBLE),
        TRY_CAST(said.register_s AS DOUBLE),
        TRY_CAST(said.restore_s AS DOUBLE)
    ),
    recorded_ns,
    said.parts
FROM (
    SELECT
        position,
        job,
        type,
        recorded_ns,
        json_transform(
            body,
            '{"attempt": "VARCHAR", "kind": "VARCHAR", "form": "VARCHAR", "bundle": "VARCHAR",
              "parent": "VARCHAR", "path": "VARCHAR", "iteration": "VARCHAR",
              "policy_version": "VARCHAR", "cursor": "VARCHAR", "bytes": "VARCHAR",
              "save_s": "VARCHAR", "register_s": "VARCHAR", "restore_s": "VARCHAR",
              "parts": "MAP(VARCHAR, VARCHAR)"}'
        ) AS said
    FROM fresh
    WHERE type IN ('CheckpointSaved', 'CheckpointRegistered', 'CheckpointRestored')
)
ORDER BY position;
