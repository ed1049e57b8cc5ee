-- Operations that began before the fresh events and go on in them; their rows are made again.
CREATE OR REPLACE TEMP TABLE continued AS
SELECT known.job, known.operation, known.first
FROM main.operation_starts AS known
SEMI JOIN (FROM fresh WHERE operation IS NOT NULL) AS touched USING (job, operation)
WHERE known.first < (SELECT min(position) FROM fresh);

-- All events of the operations of the fresh events, old and new.
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
