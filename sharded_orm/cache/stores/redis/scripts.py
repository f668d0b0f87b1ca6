"""The Lua scripts for one entry, KEYS[1]. A Redis server runs each as one atomic command."""

from __future__ import annotations

from sharded_orm.cache.stores.redis.protocol import RedisScript

#: Replaces the value of the entry by ARGV[2], for ARGV[3] seconds, if the value is ARGV[1]. Returns
#: 1 if it has replaced the value, otherwise 0.
COMPARE_AND_SET = RedisScript(
    b"if redis.call('GET', KEYS[1]) == ARGV[1] then "
    b"redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3]) return 1 end return 0"
)
#: Deletes the entry if its value is ARGV[1]. Returns 1 if it has deleted the entry, otherwise 0.
COMPARE_AND_DELETE = RedisScript(
    b"if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)
#: Replaces the value of the entry by ARGV[2] if the value is ARGV[1]. A missing entry counts as one
#: with an empty value. Returns the value that the entry has afterwards.
REPLACE_OWNER = RedisScript(
    b"local there = redis.call('GET', KEYS[1]) or '' "
    b"if there ~= ARGV[1] then return there end "
    b"redis.call('SET', KEYS[1], ARGV[2]) return ARGV[2]"
)
#: Appends a line to a guard (an entry that says whether others are valid), if the guard exists. The
#: command APPEND alone would create a missing guard, without the first line that a guard needs.
APPEND = RedisScript(
    b"if redis.call('EXISTS', KEYS[1]) == 1 then "
    b"return redis.call('APPEND', KEYS[1], ARGV[1]) end return 0"
)
