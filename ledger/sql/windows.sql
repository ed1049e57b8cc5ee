-- windows: one row for each component of each telemetry window that a decision used.
CREATE TABLE IF NOT EXISTS windows (
    position BIGINT,
    job VARCHAR,
    attempt VARCHAR,
    iteration BIGINT,
    start_ns BIGINT,
    window_s DOUBLE,
    component VARCHAR,
    replicas BIGINT,
    throughput DOUBLE,
    queue BIGINT,
    running BIGINT,
    waiting BIGINT,
    busy_share DOUBLE,
    kv_use DOUBLE,
    prefix_hit_rate DOUBLE,
    remaining BIGINT
);

-- Only where there is an event 'WindowObserved'. Rows come in the order of their positions, and of
-- the names of their components, as canonical JSON has them.
INSERT INTO windows SELECT * FROM fresh_windows;
