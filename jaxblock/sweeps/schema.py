"""The tables of a sweep's store."""

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS plans (number INTEGER PRIMARY KEY, time TEXT, plan TEXT, facts TEXT);
CREATE TABLE IF NOT EXISTS planned (plan INTEGER, position INTEGER, run TEXT, axes TEXT, PRIMARY KEY (plan, position));
CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, config TEXT, about TEXT);
CREATE TABLE IF NOT EXISTS programs (number INTEGER PRIMARY KEY, runs TEXT, about TEXT, state TEXT, worker INTEGER,
    tries INTEGER, step INTEGER, file TEXT);
CREATE TABLE IF NOT EXISTS losses (run TEXT, step INTEGER, loss REAL, gradient_norm REAL, PRIMARY KEY (run, step))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (program INTEGER, step INTEGER, steps INTEGER, seconds REAL,
    PRIMARY KEY (program, step));
CREATE TABLE IF NOT EXISTS profiles (run TEXT, moment TEXT, profile TEXT, PRIMARY KEY (run, moment));
CREATE TABLE IF NOT EXISTS results (run TEXT PRIMARY KEY, outcome TEXT, time TEXT, result TEXT);
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, time TEXT, kind TEXT, sentence TEXT, runs TEXT);
"""
