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
    candidate.strategy,
    TRY_CAST(candidate.predicted_end_s AS DOUBLE),
    TRY_CAST(candidate.predicted_gain_s AS DOUBLE),
    TRY_CAST(candidate.predicted_cost_s AS DOUBLE),
    TRY_CAST(candidate.probability AS DOUBLE),
    coalesce(TRY_CAST(candidate.chosen AS BOOLEAN), false),
    candidate.rejected_because
FROM (
    SELECT *, devices_of(candidate.after.components) AS placed
    FROM (
        SELECT
            position,
            job,
            operation,
            unnest(weighed) AS candidate,
            unnest(range(len(weighed))) AS ordinal
        FROM (
            SELECT
                position,
                job,
                operation,
                json_transform(
                    body -> '$.candidates',
                    '[{"after": {"components": "MAP(VARCHAR, STRUCT(devices VARCHAR[])[])"},
                       "strategy": "VARCHAR", "predicted_end_s": "VARCHAR",
                       "predicted_gain_s": "VARCHAR", "predicted_cost_s": "VARCHAR",
                       "probability": "VARCHAR", "chosen": "VARCHAR",
                       "rejected_because": "VARCHAR"}]'
                ) AS weighed
            FROM fresh
            WHERE type = 'ReallocationProposed'
        )
    )
)
ORDER BY position, ordinal;
