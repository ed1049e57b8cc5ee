-- shadows: one row for each window of a live run that a static schedule ran again.
CREATE TABLE IF NOT EXISTS shadows (
    position BIGINT,
    job VARCHAR,
    bundle VARCHAR,
    iteration BIGINT,
    iterations BIGINT,
    last_update BIGINT,
    method VARCHAR,
    agreed BOOLEAN,
    observations BIGINT,
    wall_s DOUBLE,
    differs_at BIGINT,
    component VARCHAR,
    difference VARCHAR,
    live VARCHAR,
    shadow VARCHAR,
    log_evidence MAP(VARCHAR, DOUBLE),
    recorded_ns BIGINT
);

INSERT INTO shadows
SELECT
    position,
    job,
    body ->> '$.bundle',
    whole_at(body, '$.iteration'),
    whole_at(body, '$.iterations'),
    whole_at(body, '$.last_update'),
    body ->> '$.method',
    flag_at(body, '$.agreed'),
    whole_at(body, '$.observations'),
    number_at(body, '$.wall_s'),
    whole_at(body, '$.difference.iteration'),
    body ->> '$.difference.component',
    (body ->> '$.difference.kind') || ' ' || (body ->> '$.difference.name') || ': '
    || (body ->> '$.difference.what'),
    body ->> '$.difference.live',
    body ->> '$.difference.shadow',
    numbers_at(body, '$.log_evidence'),
    recorded_ns
FROM fresh
WHERE type = 'ShadowCompared'
ORDER BY position;
