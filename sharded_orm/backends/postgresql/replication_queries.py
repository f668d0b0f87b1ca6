"""SQL queries about PostgreSQL's streaming replication, and about the sessions that a fence must
end. (The fence of a server closes its databases for applications.)
"""

from __future__ import annotations

STATUS = """
SELECT pg_catalog.current_setting('server_version') AS version,
  s.system_identifier || '/' || extract(epoch FROM pg_catalog.pg_postmaster_start_time())
    AS identity,
  pg_catalog.pg_is_in_recovery() AS replica,
  CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
       ELSE pg_catalog.pg_current_wal_flush_lsn() END::text AS position
FROM pg_catalog.pg_control_system() s
"""
LINK = """
SELECT r.status, r.received_tli AS timeline, r.sender_host AS host, r.sender_port AS port,
  pg_catalog.current_setting('primary_conninfo', true) AS conninfo,
  pg_catalog.pg_last_wal_receive_lsn()::text AS received,
  pg_catalog.pg_last_wal_replay_lsn()::text AS executed,
  pg_catalog.pg_is_wal_replay_paused() AS paused,
  extract(epoch FROM pg_catalog.clock_timestamp() - pg_catalog.pg_last_xact_replay_timestamp())
    AS age
FROM (SELECT 1) one LEFT JOIN pg_catalog.pg_stat_wal_receiver r ON true
"""
# The query for the databases. The version of a database's row (xmin) changes whenever somebody
# opens or closes the database.
DATABASES = """
SELECT datname AS name, datallowconn AS open, xmin::text AS version,
  pg_catalog.pg_has_role(datdba, 'USAGE') AS owned
FROM pg_catalog.pg_database WHERE datname = ANY(%s)
"""
OTHERS = """
SELECT datname AS name FROM pg_catalog.pg_database
WHERE datallowconn AND NOT datistemplate AND datname <> ALL(%s) ORDER BY datname
"""
# The query for sessions that are just being opened. Such a session holds a lock on its database
# until pg_stat_activity shows it or the server refuses it.
BEGINNING = """
SELECT l.pid, l.virtualtransaction AS transaction FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.objid
WHERE l.locktype = 'object' AND l.classid = 'pg_catalog.pg_database'::pg_catalog.regclass
  AND l.mode = 'RowExclusiveLock' AND d.datname = ANY(%s)
  AND l.pid NOT IN (SELECT a.pid FROM pg_catalog.pg_stat_activity a
                    WHERE a.backend_type = 'autovacuum worker')
"""
# The query for sessions that may write. It leaves out vacuum processes, which change no rows. It
# also leaves out senders of the physical log, which have no datname and only read. Sessions of
# logical replication may write, so they are included.
SESSIONS = """
SELECT pid, usename::text AS account FROM pg_catalog.pg_stat_activity
WHERE datname = ANY(%s) AND pid <> pg_catalog.pg_backend_pid()
  AND (backend_type IS NULL OR backend_type <> 'autovacuum worker')
"""
END_SESSIONS = f"SELECT count(pg_catalog.pg_terminate_backend(pid)) FROM ({SESSIONS}) s"
UNLOGGED = """
SELECT oid::pg_catalog.regclass::text AS name FROM pg_catalog.pg_class
WHERE relpersistence = 'u' AND relkind = 'r' ORDER BY oid LIMIT 4
"""
PRIVILEGES = """
SELECT rolsuper AS super, pg_catalog.pg_has_role('pg_monitor', 'USAGE') AS monitor,
  pg_catalog.pg_has_role('pg_signal_backend', 'USAGE') AS signal,
  pg_catalog.has_function_privilege('pg_catalog.pg_promote(boolean, integer)', 'EXECUTE') AS promote
FROM pg_catalog.pg_roles WHERE rolname = CURRENT_USER
"""
