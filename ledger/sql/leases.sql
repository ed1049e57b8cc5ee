-- leases: one row for each device of each lease, from its grant to what ended it.
CREATE TABLE IF NOT EXISTS leases (
    epoch BIGINT,
    job VARCHAR,
    device VARCHAR,
    holder VARCHAR,
    granted_ns BIGINT,
    ended_ns BIGINT,
    ended_by VARCHAR,
    ended_position BIGINT,
    reason VARCHAR
);

-- A lease is ended by a later event, so a device that new events name is made again as a whole.
CREATE OR REPLACE TEMP TABLE leased_again AS
SELECT DISTINCT unnest(list_at(body, '$.devices')) AS device
FROM fresh
WHERE type IN ('LeaseGranted', 'LeaseReleased', 'LeaseExpired');

DELETE FROM leases WHERE device IN (SELECT device FROM leased_again);

INSERT INTO leases
WITH turns AS (
    SELECT *
    FROM (
        SELECT position, job, type, recorded_ns, body, unnest(list_at(body, '$.devices')) AS device
        FROM events
        WHERE type IN ('LeaseGranted', 'LeaseReleased', 'LeaseExpired')
    )
    WHERE device IN (SELECT device FROM leased_again)
),

paired AS (
    SELECT
        *,
        lead(recorded_ns) OVER next AS ended_ns,
        lead(position) OVER next AS ended_position,
        CASE lead(type) OVER next
            WHEN 'LeaseReleased' THEN 'released'
            WHEN 'LeaseExpired' THEN 'expired'
            WHEN 'LeaseGranted' THEN 'granted again'
        END AS ended_by,
        lead(coalesce(body ->> '$.reason', body ->> '$.evidence')) OVER next AS reason
    FROM turns
    WINDOW next AS (PARTITION BY device ORDER BY position)
)

SELECT
    position,
    job,
    device,
    body ->> '$.holder',
    recorded_ns,
    ended_ns,
    ended_by,
    ended_position,
    reason
FROM paired
WHERE type = 'LeaseGranted'
ORDER BY position, device;
