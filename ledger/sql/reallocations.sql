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

DELETE FROM reallocations WHERE (job, operation) IN (SELECT job, operation FROM touched);

INSERT INTO reallocations
WITH steps AS (
    SELECT events.*
    FROM events JOIN touched USING (job, operation)
    WHERE type IN (
        'ReallocationProposed', 'ReallocationRejected', 'ReallocationAbandoned',
        'ReallocationGranted', 'ReallocationQuiesced', 'ReallocationTransferred',
        'ReallocationVerified', 'ReallocationCommitted', 'ReallocationRolledBack',
        'ReallocationPoisoned', 'OperationTakenOver', 'GainRealized'
    )
),

folded AS (
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
    GROUP BY job, operation
)

SELECT
    position,
    job,
    proposed ->> '$.attempt',
    operation,
    status,
    coalesce(proposed ->> '$.proposer', 'scheduler'),
    proposed_by,
    proposed_ns,
    granted_ns,
    closed_ns,
    proposed ->> '$.strategy',
    placement_text(placed_before),
    placement_text(placed_after),
    placed_before,
    placed_after,
    proposed ->> '$.bottleneck_before',
    proposed ->> '$.bottleneck_after',
    number_at(proposed, '$.predicted_throughput'),
    number_at(proposed, '$.predicted_gain_s'),
    number_at(proposed, '$.gain_interval.low'),
    number_at(proposed, '$.gain_interval.high'),
    number_at(proposed, '$.predicted_cost_s'),
    number_at(proposed, '$.horizon_s'),
    whole_at(proposed, '$.model_version'),
    number_at(proposed, '$.since_last_move_s'),
    coalesce(flag_at(proposed, '$.restoring'), false),
    whole_at(proposed, '$.window'),
    epoch,
    taken_over,
    number_at(quiesced, '$.quiesce_s'),
    number_at(transferred, '$.transfer_s'),
    coalesce(whole_at(committed, '$.moved_bytes'), whole_at(transferred, '$.moved_bytes')),
    TRY_CAST(transferred -> '$.parts' AS MAP(VARCHAR, BIGINT)),
    coalesce(number_at(committed, '$.stall_s'), number_at(rolled_back, '$.stall_s')),
    numbers_at(committed, '$.stalls'),
    coalesce(whole_at(committed, '$.kv_tokens_lost'), whole_at(quiesced, '$.kv_tokens_lost')),
    number_at(gain, '$.adjusted_gain_s'),
    number_at(gain, '$.interval.low'),
    number_at(gain, '$.interval.high'),
    number_at(gain, '$.raw_gain_s'),
    gain ->> '$.counterfactual',
    number_at(gain, '$.device_s_before'),
    number_at(gain, '$.device_s_after'),
    rejected ->> '$.by',
    rejected ->> '$.rule',
    coalesce(
        rejected ->> '$.reason', abandoned ->> '$.reason', rolled_back ->> '$.cause',
        poisoned ->> '$.cause'
    )
FROM (
    SELECT
        *,
        placement(proposed -> '$.before') AS placed_before,
        placement(proposed -> '$.after') AS placed_after
    FROM folded
    WHERE proposed IS NOT NULL
)
ORDER BY position;
