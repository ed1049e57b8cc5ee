-- candidates: one row for each topology that a proposal weighed, with its score.
CREATE TABLE IF NOT EXISTS candidates (
    position BIGINT,
    job VARCHAR,
    operation VARCHAR,
    ordinal BIGINT,
    after VARCHAR,
    strategy VARCHAR,
    predicted_end_s DOUBLE,
    predicted_gain_s DOUBLE,
    predicted_cost_s DOUBLE,
    probability DOUBLE,
    chosen BOOLEAN,
    rejected_because VARCHAR
);

INSERT INTO candidates
SELECT
    position,
    job,
    operation,
    ordinal,
    placement_text(placed),
    candidate ->> '$.strategy',
    number_at(candidate, '$.predicted_end_s'),
    number_at(candidate, '$.predicted_gain_s'),
    number_at(candidate, '$.predicted_cost_s'),
    number_at(candidate, '$.probability'),
    coalesce(flag_at(candidate, '$.chosen'), false),
    candidate ->> '$.rejected_because'
FROM (
    SELECT *, placement(candidate -> '$.after') AS placed
    FROM (
        SELECT
            position,
            job,
            operation,
            unnest(TRY_CAST(body -> '$.candidates' AS JSON[])) AS candidate,
            unnest(range(json_array_length(body -> '$.candidates')::BIGINT)) AS ordinal
        FROM fresh
        WHERE type = 'ReallocationProposed'
    )
)
ORDER BY position, ordinal;
