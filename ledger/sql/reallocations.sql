-- reallocations: one row for each proposed move, with what it promised, how far it came, what it
-- cost and what it brought.
CREATE TABLE IF NOT EXISTS reallocations (
    position BIGINT,
    job VARCHAR,
    attempt VARCHAR,
    operation VARCHAR,
    status VARCHAR,
    proposer VARCHAR,
    proposed_by VARCHAR,
    proposed_ns BIGINT,
    granted_ns BIGINT,
    closed_ns BIGINT,
    strategy VARCHAR,
    before VARCHAR,
    after VARCHAR,
    before_placement MAP(VARCHAR, VARCHAR[]),
    after_placement MAP(VARCHAR, VARCHAR[]),
    bottleneck_before VARCHAR,
    bottleneck_after VARCHAR,
    predicted_throughput DOUBLE,
    predicted_gain_s DOUBLE,
    predicted_gain_low_s DOUBLE,
    predicted_gain_high_s DOUBLE,
    predicted_cost_s DOUBLE,
    horizon_s DOUBLE,
    model_version BIGINT,
    since_last_move_s DOUBLE,
    restoring BOOLEAN,
    window_position BIGINT,
    epoch BIGINT,
    taken_over BIGINT,
    quiesce_s DOUBLE,
    transfer_s DOUBLE,
    moved_bytes BIGINT,
    moved_parts MAP(VARCHAR, BIGINT),
    stall_s DOUBLE,
    stalls MAP(VARCHAR, DOUBLE),
    kv_tokens_lost BIGINT,
    realised_gain_s DOUBLE,
    realised_gain_low_s DOUBLE,
    realised_gain_high_s DOUBLE,
    raw_gain_s DOUBLE,
    counterfactual VARCHAR,
    device_s_before DOUBLE,
    device_s_after DOUBLE,
    rejected_by VARCHAR,
    rule VARCHAR,
    reason VARCHAR
);

-- Rows that are made again; a batch in which no operation goes on has none.
DELETE FROM reallocations WHERE (job, operation) IN (SELECT job, operation FROM continued);

-- Each body is taken apart in one pass: one for each field would cost many times as much. Numbers
-- come as text, which holds NaN, Infinity and -Infinity too.
INSERT INTO reallocations
WITH folded AS (
    SELECT
        job,
        operation,
        min(position) FILTER (WHERE type = 'ReallocationProposed') AS position,
        arg_max(status_after(type), position) FILTER (WHERE status_after(type) IS NOT NULL)
            AS status,
        any_value(actor) FILTER (WHERE type = 'ReallocationProposed') AS proposed_by,
        min(recorded_ns) FILTER (WHERE type = 'ReallocationProposed') AS proposed_ns,
        min(recorded_ns) FILTER (WHERE type = 'ReallocationGranted') AS granted_ns,
        max(recorded_ns) FILTER (
            WHERE type IN (
                'ReallocationRejected', 'ReallocationAbandoned', 'ReallocationCommitted',
                'ReallocationRolledBack', 'ReallocationPoisoned'
            )
        ) AS closed_ns,
        max(position) FILTER (WHERE type IN ('ReallocationGranted', 'OperationTakenOver'))
            AS epoch,
        count(*) FILTER (WHERE type = 'OperationTakenOver') AS taken_over,
        any_value(body) FILTER (WHERE type = 'ReallocationProposed') AS proposed,
        any_value(body) FILTER (WHERE type = 'ReallocationRejected') AS rejected,
        any_value(body) FILTER (WHERE type = 'ReallocationAbandoned') AS abandoned,
        any_value(body) FILTER (WHERE type = 'ReallocationQuiesced') AS quiesced,
        any_value(body) FILTER (WHERE type = 'ReallocationTransferred') AS transferred,
        any_value(body) FILTER (WHERE type = 'ReallocationCommitted') AS committed,
        any_value(body) FILTER (WHERE type = 'ReallocationRolledBack') AS rolled_back,
        any_value(body) FILTER (WHERE type = 'ReallocationPoisoned') AS poisoned,
        arg_max(body, position) FILTER (WHERE type = 'GainRealized') AS gain
    FROM steps
    WHERE type IN (
        'ReallocationProposed', 'ReallocationRejected', 'ReallocationAbandoned',
        'ReallocationGranted', 'ReallocationQuiesced', 'ReallocationTransferred',
        'ReallocationVerified', 'ReallocationCommitted', 'ReallocationRolledBack',
        'ReallocationPoisoned', 'OperationTakenOver', 'GainRealized'
    )
    GROUP BY job, operation
),

parts AS (
    SELECT
        * EXCLUDE (proposed, quiesced, transferred, committed, rolled_back, gain, rejected),
        json_transform(
            proposed,
            '{"attempt": "VARCHAR", "proposer": "VARCHAR", "strategy": "VARCHAR",
              "before": {"components": "MAP(VARCHAR, STRUCT(devices VARCHAR[])[])"},
              "after": {"components": "MAP(VARCHAR, STRUCT(devices VARCHAR[])[])"},
              "bottleneck_before": "VARCHAR",
              "bottleneck_after": "VARCHAR", "predicted_throughput": "VARCHAR",
              "predicted_gain_s": "VARCHAR", "gain_interval": {"low": "VARCHAR", "high": "VARCHAR"},
              "predicted_cost_s": "VARCHAR", "horizon_s": "VARCHAR", "model_version": "VARCHAR",
              "since_last_move_s": "VARCHAR", "restoring": "VARCHAR", "window": "VARCHAR"}'
        ) AS proposed,
        json_transform(quiesced, '{"quiesce_s": "VARCHAR", "kv_tokens_lost": "VARCHAR"}')
            AS quiesced,
        json_transform(
            transferred, '{"transfer_s": "VARCHAR", "moved_bytes": "VARCHAR",
              "parts": "MAP(VARCHAR, BIGINT)"}'
        ) AS transferred,
        json_transform(
            committed,
            '{"moved_bytes": "VARCHAR", "stall_s": "VARCHAR",
              "stalls": "MAP(VARCHAR, DOUBLE)",
              "kv_tokens_lost": "VARCHAR"}'
        ) AS committed,
        json_transform(rolled_back, '{"stall_s": "VARCHAR", "cause": "VARCHAR"}') AS rolled_back,
        json_transform(
            gain,
            '{"adjusted_gain_s": "VARCHAR", "interval": {"low": "VARCHAR", "high": "VARCHAR"},
              "raw_gain_s": "VARCHAR", "counterfactual": "VARCHAR", "device_s_before": "VARCHAR",
              "device_s_after": "VARCHAR"}'
        ) AS gain,
        json_transform(rejected, '{"by": "VARCHAR", "rule": "VARCHAR", "reason": "VARCHAR"}')
            AS rejected
    FROM folded
    WHERE proposed IS NOT NULL
)

SELECT
    position,
    job,
    proposed.attempt,
    operation,
    status,
    coalesce(proposed.proposer, 'scheduler'),
    proposed_by,
    proposed_ns,
    granted_ns,
    closed_ns,
    proposed.strategy,
    placement_text(placed_before),
    placement_text(placed_after),
    placed_before,
    placed_after,
    proposed.bottleneck_before,
    proposed.bottleneck_after,
    TRY_CAST(proposed.predicted_throughput AS DOUBLE),
    TRY_CAST(proposed.predicted_gain_s AS DOUBLE),
    TRY_CAST(proposed.gain_interval.low AS DOUBLE),
    TRY_CAST(proposed.gain_interval.high AS DOUBLE),
    TRY_CAST(proposed.predicted_cost_s AS DOUBLE),
    TRY_CAST(proposed.horizon_s AS DOUBLE),
    TRY_CAST(proposed.model_version AS BIGINT),
    TRY_CAST(proposed.since_last_move_s AS DOUBLE),
    coalesce(TRY_CAST(proposed.restoring AS BOOLEAN), false),
    TRY_CAST(proposed."window" AS BIGINT),
    epoch,
    taken_over,
    TRY_CAST(quiesced.quiesce_s AS DOUBLE),
    TRY_CAST(transferred.transfer_s AS DOUBLE),
    coalesce(
        TRY_CAST(committed.moved_bytes AS BIGINT), TRY_CAST(transferred.moved_bytes AS BIGINT)
    ),
    transferred.parts,
    coalesce(TRY_CAST(committed.stall_s AS DOUBLE), TRY_CAST(rolled_back.stall_s AS DOUBLE)),
    committed.stalls,
    coalesce(
        TRY_CAST(committed.kv_tokens_lost AS BIGINT), TRY_CAST(quiesced.kv_tokens_lost AS BIGINT)
    ),
    TRY_CAST(gain.adjusted_gain_s AS DOUBLE),
    TRY_CAST(gain.interval.low AS DOUBLE),
    TRY_CAST(gain.interval.high AS DOUBLE),
    TRY_CAST(gain.raw_gain_s AS DOUBLE),
    gain.counterfactual,
    TRY_CAST(gain.device_s_before AS DOUBLE),
    TRY_CAST(gain.device_s_after AS DOUBLE),
    rejected.by,
    rejected.rule,
    coalesce(
        rejected.reason, abandoned ->> '$.reason', rolled_back.cause, poisoned ->> '$.cause'
    )
FROM (
    SELECT
        *,
        devices_of(proposed.before.components) AS placed_before,
        devices_of(proposed.after.components) AS placed_after
    FROM parts
)
ORDER BY position;
