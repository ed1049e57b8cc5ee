-- How values are read out of a stored body; every other file uses these.

-- Numbers may be the strings NaN, Infinity and -Infinity; a cast from text reads both kinds.
CREATE OR REPLACE MACRO number_at(body, path) AS TRY_CAST(body ->> path AS DOUBLE);

-- Whole numbers above 2^63 - 1 do not fit a BIGINT: null here, and whole in events.body.
CREATE OR REPLACE MACRO whole_at(body, path) AS TRY_CAST(body ->> path AS BIGINT);

CREATE OR REPLACE MACRO flag_at(body, path) AS TRY_CAST(body ->> path AS BOOLEAN);

CREATE OR REPLACE MACRO list_at(body, path) AS TRY_CAST(body -> path AS VARCHAR[]);

CREATE OR REPLACE MACRO numbers_at(body, path) AS TRY_CAST(body -> path AS MAP(VARCHAR, DOUBLE));

-- Components of a topology, {component: [{devices: [device, ...]}, ...]}, as
-- {component: [device, ...]}.
CREATE OR REPLACE MACRO devices_of(components) AS map_from_entries(
    list_transform(
        map_entries(components),
        lambda entry: struct_pack(
            key := entry.key,
            value := flatten(list_transform(entry.value, lambda replica: replica.devices))
        )
    )
);

-- The same of a topology in JSON.
CREATE OR REPLACE MACRO placement(topology) AS devices_of(
    TRY_CAST(topology -> '$.components' AS MAP(VARCHAR, STRUCT(devices VARCHAR[])[]))
);

-- A placement for people: rollout[n/0 n/1] trainer[n/1].
CREATE OR REPLACE MACRO placement_text(placed) AS array_to_string(
    list_transform(
        list_sort(map_entries(placed)),
        lambda entry: entry.key || '[' || array_to_string(entry.value, ' ') || ']'
    ),
    ' '
);

-- Status that an event gives its reallocation; null for events that leave it as it is.
CREATE OR REPLACE MACRO status_after(type) AS CASE type
    WHEN 'ReallocationProposed' THEN 'proposed'
    WHEN 'ReallocationRejected' THEN 'rejected'
    WHEN 'ReallocationAbandoned' THEN 'abandoned'
    WHEN 'ReallocationGranted' THEN 'granted'
    WHEN 'ReallocationQuiesced' THEN 'quiesced'
    WHEN 'ReallocationTransferred' THEN 'transferred'
    WHEN 'ReallocationVerified' THEN 'verified'
    WHEN 'ReallocationCommitted' THEN 'committed'
    WHEN 'ReallocationRolledBack' THEN 'rolled_back'
    WHEN 'ReallocationPoisoned' THEN 'poisoned'
END;
