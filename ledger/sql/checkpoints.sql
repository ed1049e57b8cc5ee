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

INSERT INTO checkpoints
SELECT
    position,
    job,
    body ->> '$.attempt',
    CASE type
        WHEN 'CheckpointSaved' THEN 'saved'
        WHEN 'CheckpointRegistered' THEN 'registered'
        ELSE 'restored'
    END,
    coalesce(body ->> '$.kind', body ->> '$.form'),
    body ->> '$.bundle',
    body ->> '$.parent',
    body ->> '$.path',
    whole_at(body, '$.iteration'),
    whole_at(body, '$.policy_version'),
    whole_at(body, '$.cursor'),
    whole_at(body, '$.bytes'),
    coalesce(
        number_at(body, '$.save_s'),
        number_at(body, '$.register_s'),
        number_at(body, '$.restore_s')
    ),
    recorded_ns,
    TRY_CAST(body -> '$.parts' AS MAP(VARCHAR, VARCHAR))
FROM fresh
WHERE type IN ('CheckpointSaved', 'CheckpointRegistered', 'CheckpointRestored')
ORDER BY position;
