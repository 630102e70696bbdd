"""The tables as they are at the newest migration; the tenant is in every key.

Called by the store's queries. The migrations in `migrations/versions` make these tables; a test
compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)

HEAD_REVISION = "0001"

metadata = MetaData()

trees = Table(
    "trees",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("tree_id", Text, primary_key=True),
    Column("ended", Boolean, nullable=False),
    Index("trees_live", "tenant_id", "tree_id", sqlite_where=text("ended = 0")),
)

records = Table(
    "records",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("tree_id", Text, primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("invocation_id", Text, nullable=False),
    Column("time_us", BigInteger, nullable=False),
    Column("engine_version", Integer, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)

invocations = Table(
    "invocations",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("invocation_id", Text, primary_key=True),
    Column("tree_id", Text, nullable=False),
    Column("parent_id", Text, nullable=False),
    Column("depth", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("create_time_us", BigInteger, nullable=False),
    Column("end_time_us", BigInteger, nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("snapshot", LargeBinary, nullable=False),
    Column("value", LargeBinary, nullable=False),
    Index("invocations_by_tree", "tenant_id", "tree_id", "ordinal", "invocation_id"),
    Index("invocations_by_time", "tenant_id", "create_time_us", "invocation_id"),
)

requests = Table(
    "requests",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("request_id", Text, primary_key=True),
    Column("content_digest", Text, nullable=False),
    Column("answer_id", Text, nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("artifact_id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("media_type", Text, nullable=False),
    Column("invocation_id", Text, nullable=False),
    Column("create_time_us", BigInteger, nullable=False),
    Index(
        "artifacts_by_name",
        "tenant_id",
        "invocation_id",
        "name",
        unique=True,
        sqlite_where=text("invocation_id != ''"),
    ),
    Index("artifacts_by_digest", "tenant_id", "sha256"),
)

refusals = Table(
    "refusals",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("invocation_id", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("reason", Text, nullable=False),
)
