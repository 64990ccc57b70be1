CREATE TABLE uploads (
    id TEXT PRIMARY KEY, summary TEXT NOT NULL, bytes INTEGER NOT NULL, used_s REAL NOT NULL
) STRICT;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    idempotency_key TEXT UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'done', 'failed', 'cancelled')),
    question TEXT NOT NULL,
    upload TEXT NOT NULL REFERENCES uploads (id),
    timeout_s REAL NOT NULL,
    progress REAL NOT NULL DEFAULT 0,
    says TEXT NOT NULL DEFAULT 'waiting for its turn',
    simulations INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    cancel INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL,
    started_s REAL,
    finished_s REAL
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE TABLE plans (
    id TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    made_s REAL NOT NULL,
    brief TEXT NOT NULL,
    plan TEXT NOT NULL
) STRICT;
-- One row for each time a job was begun: so that "none is run twice" can be looked up.
CREATE TABLE runs (
    job TEXT NOT NULL, attempt INTEGER NOT NULL, started_s REAL NOT NULL, ended_s REAL, outcome TEXT,
    PRIMARY KEY (job, attempt)
) STRICT;
CREATE TABLE servings (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    plan TEXT NOT NULL REFERENCES plans (id), started_s REAL NOT NULL, ended_s REAL
) STRICT;
