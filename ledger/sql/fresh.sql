-- Stored events (incoming.data) as they are taken apart, before any table takes them in.
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
)
