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

CREATE OR REPLACE TEMP TABLE fresh AS
SELECT
    envelope.position,
    envelope.job,
    envelope.version,
    envelope.type,
    envelope.schema,
    envelope.occurred_ns,
    envelope.recorded_ns,
    make_timestamp(envelope.recorded_ns // 1000) AS recorded_at,
    envelope.writer,
    envelope.sequence,
    envelope.actor,
    envelope.operation,
    envelope.cause,
    envelope.key,
    bytes,
    envelope.body
FROM (
    SELECT
        strlen(data) AS bytes,
        from_json(
            data,
            '{"position": "BIGINT", "job": "VARCHAR", "version": "BIGINT", "type": "VARCHAR",
              "schema": "INTEGER", "occurred_ns": "BIGINT", "recorded_ns": "BIGINT",
              "writer": "VARCHAR", "sequence": "BIGINT", "actor": "VARCHAR",
              "operation": "VARCHAR", "cause": "BIGINT", "key": "VARCHAR", "body": "JSON"}'
        ) AS envelope
    FROM incoming
);

INSERT INTO events SELECT * FROM fresh ORDER BY position;

-- Operations that the new events touch; their rows in the tables below are made again.
CREATE OR REPLACE TEMP TABLE touched AS
SELECT DISTINCT job, operation FROM fresh WHERE operation IS NOT NULL;
