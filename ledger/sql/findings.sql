-- findings: one row for each thing that a recorded verification held against the ledger.
CREATE TABLE IF NOT EXISTS findings (
    position BIGINT,
    job VARCHAR,
    invariant VARCHAR,
    severity VARCHAR,
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
    -- Schema 1 did not say; it is lifted as the graver, as in ledger/events/upcasters.py.
    coalesce(body ->> '$.severity', 'stop'),
    whole_at(body, '$.at'),
    body ->> '$.expected',
    body ->> '$.found',
    TRY_CAST(body -> '$.positions' AS BIGINT[]),
    recorded_ns,
    actor
FROM fresh
WHERE type = 'DivergenceFlagged'
ORDER BY position;
