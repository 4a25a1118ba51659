-- A store as schema 0011 left it; never changed, as files of users are not.
BEGIN TRANSACTION;
CREATE TABLE added_adapters (
	name VARCHAR NOT NULL, 
	version BIGINT NOT NULL, 
	base VARCHAR NOT NULL, 
	source VARCHAR NOT NULL, 
	aliases TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "added_adapters" VALUES('a',5,'base','/lora/a','["alias"]');
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0011');
CREATE TABLE api_keys (
	id VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	tenant VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	sla_class VARCHAR NOT NULL, 
	tasks TEXT NOT NULL, 
	models TEXT NOT NULL, 
	default_task VARCHAR NOT NULL, 
	created_at_s DOUBLE NOT NULL, 
	expires_at_s DOUBLE, role VARCHAR DEFAULT 'user' NOT NULL, bounds TEXT DEFAULT '[]' NOT NULL, session_target_s DOUBLE, 
	PRIMARY KEY (id)
);
INSERT INTO "api_keys" VALUES('k1','0000000000000000000000000000000000000000000000000000000000000000','blue','','interactive','[]','[]','',0.0,NULL,'user','[]',NULL);
CREATE TABLE audit (
	id INTEGER NOT NULL, 
	at_s DOUBLE NOT NULL, 
	who VARCHAR NOT NULL, 
	action VARCHAR NOT NULL, 
	tenant VARCHAR NOT NULL, 
	target VARCHAR NOT NULL, 
	"before" TEXT, 
	"after" TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "audit" VALUES(1,1.79556095213114547733e+09,'root','tenant.limit','blue','blue',NULL,'{"name": "blue", "requests_per_minute": null, "tokens_per_minute": null, "tokens_per_month": null, "weight": 2.0}');
INSERT INTO "audit" VALUES(2,1.79556095213444232936e+09,'root','key.create','blue','k1',NULL,'{"id": "k1", "tenant": "blue", "name": "", "sla_class": "interactive", "tasks": [], "models": [], "default_task": "", "created_at_s": 0.0, "expires_at_s": null, "role": "user", "bounds": {}, "session_target_s": null}');
INSERT INTO "audit" VALUES(3,1.79556095214582371708e+09,'','adapter.add','','a',NULL,'{"name": "a", "source": "/lora/a", "aliases": ["alias"], "version": 5}');
CREATE TABLE card_time (
	day VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	card_s DOUBLE NOT NULL, 
	PRIMARY KEY (day, model)
);
CREATE TABLE dag_runs (
	id INTEGER NOT NULL, 
	task VARCHAR NOT NULL, 
	stages TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "dag_runs" VALUES(1,'t','[[[[-1,100]],20,1.5],[[[-1,30]],40,0.5]]');
CREATE TABLE hosted_models (
	pool VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	version INTEGER NOT NULL, 
	added_at_s DOUBLE NOT NULL, 
	model TEXT NOT NULL, 
	profile TEXT NOT NULL, 
	PRIMARY KEY (pool, name, version)
);
CREATE TABLE length_samples (
	id INTEGER NOT NULL, 
	task VARCHAR NOT NULL, 
	node VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	prompt_tokens INTEGER NOT NULL, 
	output_tokens INTEGER NOT NULL, 
	finish_reason VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "length_samples" VALUES(1,'t','draft','m',100,10,'stop');
CREATE TABLE node_means (
	task VARCHAR NOT NULL, 
	node VARCHAR NOT NULL, 
	quantity VARCHAR NOT NULL, 
	value DOUBLE NOT NULL, 
	samples BIGINT NOT NULL, 
	PRIMARY KEY (task, node, quantity)
);
INSERT INTO "node_means" VALUES('t','draft','service_s',1.5,1);
CREATE TABLE pool_errors (
	pool VARCHAR NOT NULL, 
	predicted_queue_s DOUBLE NOT NULL, 
	queue_s DOUBLE NOT NULL, 
	predicted_service_s DOUBLE NOT NULL, 
	service_s DOUBLE NOT NULL, 
	samples BIGINT NOT NULL, 
	PRIMARY KEY (pool)
);
INSERT INTO "pool_errors" VALUES('p',0.1,0.2,1.0,2.0,7);
CREATE TABLE profiles (
	name VARCHAR NOT NULL, 
	measured_at_s DOUBLE NOT NULL, 
	document TEXT NOT NULL, 
	PRIMARY KEY (name, measured_at_s)
);
CREATE TABLE reactions (
	request_id VARCHAR NOT NULL, 
	reaction VARCHAR NOT NULL, 
	choice INTEGER NOT NULL, 
	view_id VARCHAR NOT NULL, 
	select_kind VARCHAR NOT NULL, 
	after_s DOUBLE, 
	task VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	e2e_s DOUBLE NOT NULL, 
	at_s DOUBLE NOT NULL, 
	tenant VARCHAR DEFAULT '' NOT NULL, 
	CONSTRAINT reactions_of_tenants PRIMARY KEY (request_id, reaction, choice, view_id, tenant)
);
CREATE TABLE receipts (
	request_id VARCHAR NOT NULL, 
	task VARCHAR NOT NULL, 
	status VARCHAR NOT NULL, 
	met BOOLEAN NOT NULL, 
	ended_at_s DOUBLE NOT NULL, 
	document TEXT NOT NULL, 
	tenant VARCHAR DEFAULT '' NOT NULL, 
	session VARCHAR DEFAULT '' NOT NULL, 
	CONSTRAINT receipts_of_tenants PRIMARY KEY (request_id, tenant)
);
INSERT INTO "receipts" VALUES('req','t','done',1,5.0,'{"request_id":"req","task":"t","status":"done","metric":"e2e","target_s":1.0,"achieved_s":1.0,"met":true,"ttft_s":0.5,"tpot_s":0.0,"e2e_s":1.0,"output_tokens":10,"queue_s":0.0,"overhead_s":0.0,"simulated":true,"nodes":[{"node":"draft","kind":"llm","round":1,"item":null,"status":"done","started_s":0.0,"spent_s":1.0,"budget_s":null,"limit_s":null,"problem":"","llm":{"model":"m","pool":"p","replica":"r","deployment":"d","queue_s":0.0,"priority":0,"slack_s":0.0,"predicted_s":0.0,"engine_ttft_s":0.1,"prompt_tokens":100,"cached_prompt_tokens":0,"output_tokens":10,"finish_reason":"stop","attempts":1,"simulated":true,"reasons":[],"expected_tokens":0,"length_bound_tokens":0,"predicted_queue_s":0.0,"service_s":0.0,"predicted_service_s":0.0,"expected_prompt_tokens":0,"expected_cached_tokens":0,"uncached_prompt_tokens":0,"placement":"","home":"","reused":""}}],"path":[],"problem":"","notes":[],"tenant":"","key":"","passed":"","session":"","turn":0,"parent":"","client":"","turn_kind":"","changes":[],"tpot_target_s":null,"excuse":"","think_s":null,"session_target_s":null,"session_slack_s":null,"rollouts":[]}','','');
CREATE TABLE rollouts (
	name VARCHAR NOT NULL, 
	document TEXT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE tenants (
	name VARCHAR NOT NULL, 
	requests_per_minute BIGINT, 
	tokens_per_minute BIGINT, 
	tokens_per_month BIGINT, 
	weight DOUBLE NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "tenants" VALUES('blue',NULL,NULL,NULL,2.0);
CREATE TABLE usage (
	day VARCHAR NOT NULL, 
	tenant VARCHAR NOT NULL, 
	"key" VARCHAR NOT NULL, 
	task VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	requests BIGINT NOT NULL, 
	prompt_tokens BIGINT NOT NULL, 
	cached_prompt_tokens BIGINT NOT NULL, 
	output_tokens BIGINT NOT NULL, 
	PRIMARY KEY (day, tenant, "key", task, model)
);
CREATE TABLE usual_arrivals (
	pool VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	is_weekend BOOLEAN NOT NULL, 
	slice INTEGER NOT NULL, 
	arrivals DOUBLE NOT NULL, 
	days INTEGER NOT NULL, 
	PRIMARY KEY (pool, model, is_weekend, slice)
);
CREATE INDEX ix_length_samples_name ON length_samples (task, node, model);
CREATE INDEX ix_dag_runs_task ON dag_runs (task);
CREATE INDEX ix_receipts_ended_at_s ON receipts (ended_at_s);
CREATE INDEX ix_receipts_session ON receipts (session);
CREATE INDEX ix_reactions_at_s ON reactions (at_s);
CREATE INDEX ix_audit_tenant ON audit (tenant);
CREATE TRIGGER audit_no_UPDATE BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_no_DELETE BEFORE DELETE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
COMMIT;
