PRAGMA application_id = 1667591276;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE episodes (
    run TEXT PRIMARY KEY, task TEXT NOT NULL, status TEXT NOT NULL, steps INTEGER NOT NULL,
    ended REAL NOT NULL
) WITHOUT ROWID;
INSERT INTO "episodes" VALUES('6acd5a8d9265','Refund order 17, and tell me what was paid.','completed',2,1.79582287917036151889e+09);
CREATE TABLE facts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE, kept REAL NOT NULL);
INSERT INTO "facts" VALUES(1,'orders are numbered from 17',1.79582287849207973473e+09);
CREATE TABLE recipes (
    task TEXT NOT NULL, tools TEXT NOT NULL, runs INTEGER NOT NULL, successes INTEGER NOT NULL,
    used REAL NOT NULL, PRIMARY KEY (task, tools)
) WITHOUT ROWID;
INSERT INTO "recipes" VALUES('Refund order 17, and tell me what was paid.','["find_order","refund"]',1,1,1.79582287917036151889e+09);
CREATE TABLE tool_runs (
    tool TEXT NOT NULL, run TEXT NOT NULL, well INTEGER NOT NULL, PRIMARY KEY (tool, run)
) WITHOUT ROWID;
INSERT INTO "tool_runs" VALUES('find_order','6acd5a8d9265',1);
INSERT INTO "tool_runs" VALUES('refund','6acd5a8d9265',1);
CREATE INDEX episodes_by_age ON episodes (ended);
COMMIT;
