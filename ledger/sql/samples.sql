-- samples: one row for each sample of each attempt, joined from the evidence segments of its
-- generation, its reward and its consumption; columns of a segment that is missing are null.
CREATE TABLE IF NOT EXISTS main.sample_rows (
    act VARCHAR,
    position BIGINT,
    job VARCHAR,
    attempt VARCHAR,
    iteration BIGINT,
    uid VARCHAR,
    turns BIGINT,
    tokens BIGINT,
    token_digest VARCHAR,
    version_min BIGINT,
    version_max BIGINT,
    replica VARCHAR,
    reward DOUBLE,
    scorer VARCHAR,
    advantage DOUBLE,
    virtual_rank BIGINT
);

-- Segments that events name; a missing one is looked for again at every refresh.
CREATE TABLE IF NOT EXISTS main.segments (
    position BIGINT,
    job VARCHAR,
    type VARCHAR,
    attempt VARCHAR,
    iteration BIGINT,
    sha256 VARCHAR,
    rows BIGINT,
    columns VARCHAR[],
    bytes BIGINT,
    loaded BOOLEAN,
    problem VARCHAR
);

INSERT INTO main.segments
SELECT
    position,
    job,
    type,
    said.attempt,
    TRY_CAST(said.iteration AS BIGINT),
    said.segment.sha256,
    TRY_CAST(said.segment.rows AS BIGINT),
    said.segment.columns,
    TRY_CAST(said.segment.bytes AS BIGINT),
    false,
    NULL
FROM (
    SELECT
        position,
        job,
        type,
        json_transform(
            body,
            '{"attempt": "VARCHAR", "iteration": "VARCHAR", "segment": {"sha256": "VARCHAR",
              "rows": "VARCHAR", "columns": ["VARCHAR"], "bytes": "VARCHAR"}}'
        ) AS said
    FROM fresh
    WHERE type IN ('SamplesGenerated', 'SamplesRewarded', 'BatchConsumed')
)
WHERE said.segment.sha256 IS NOT NULL;

CREATE VIEW IF NOT EXISTS samples AS
SELECT
    job,
    attempt,
    iteration,
    uid,
    any_value(turns) AS turns,
    any_value(tokens) AS tokens,
    any_value(token_digest) AS token_digest,
    any_value(version_min) AS version_min,
    any_value(version_max) AS version_max,
    any_value(replica) AS replica,
    any_value(reward) AS reward,
    any_value(scorer) AS scorer,
    any_value(advantage) AS advantage,
    any_value(virtual_rank) AS virtual_rank,
    count(*) FILTER (WHERE act = 'generated') AS generated,
    count(*) FILTER (WHERE act = 'rewarded') AS rewarded,
    count(*) FILTER (WHERE act = 'consumed') AS consumed
FROM main.sample_rows
GROUP BY job, attempt, iteration, uid;
