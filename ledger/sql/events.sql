-- events: every event of the ledger, one row each; the envelope is typed, the body is JSON.
CREATE TABLE IF NOT EXISTS events (
    position BIGINT,
    job VARCHAR,
    version BIGINT,
    type VARCHAR,
    schema INTEGER,
    occurred_ns BIGINT,
    recorded_ns BIGINT,
    recorded_at TIMESTAMP,
    writer VARCHAR,
    sequence BIGINT,
    actor VARCHAR,
    operation VARCHAR,
    cause BIGINT,
    key VARCHAR,
    bytes BIGINT,
    body JSON
);

-- They come in the order of their positions.
INSERT INTO events SELECT * FROM fresh;

-- Operations that the new events touch; their rows in other tables are made again.
CREATE OR REPLACE TEMP TABLE touched AS
SELECT job, operation, min(position) AS first
FROM fresh
WHERE operation IS NOT NULL
GROUP BY job, operation;

-- Where each operation begins, so that one that goes on is found without reading all events.
CREATE TABLE IF NOT EXISTS main.operation_starts (
    job VARCHAR,
    operation VARCHAR,
    first BIGINT
);

CREATE OR REPLACE TEMP TABLE continued AS
SELECT known.job, known.operation, known.first
FROM touched JOIN main.operation_starts AS known USING (job, operation);

INSERT INTO main.operation_starts
SELECT job, operation, first FROM touched ANTI JOIN continued USING (job, operation);

-- All events of the touched operations, old and new.
CREATE OR REPLACE TEMP TABLE earlier AS
SELECT events.*
FROM events SEMI JOIN continued USING (job, operation)
WHERE
    events.position >= (SELECT min(first) FROM continued)
    AND events.position < (SELECT min(position) FROM fresh);

CREATE OR REPLACE TEMP VIEW steps AS
SELECT * FROM fresh WHERE operation IS NOT NULL
UNION ALL
SELECT * FROM earlier;
