-- findings: one row for each thing that a recorded verification held against the ledger.
CREATE TABLE IF NOT EXISTS findings (
    position BIGINT,
    job VARCHAR,
    invariant VARCHAR,
    at_position BIGINT,
    expected VARCHAR,
    found VARCHAR,
    positions BIGINT[],
    recorded_ns BIGINT,
    recorded_by VARCHAR
);

INSERT INTO findings
SELECT
    position,
    job,
    body ->> '$.invariant',
    whole_at(body, '$.at'),
    body ->> '$.expected',
    body ->> '$.found',
    TRY_CAST(body -> '$.positions' AS BIGINT[]),
    recorded_ns,
    actor
FROM fresh
WHERE type = 'DivergenceFlagged'
ORDER BY position;
