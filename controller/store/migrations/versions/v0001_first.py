"""The journal, the read model, requests, counters and artifacts; the tenant in every key.

Called by Alembic at the controller's start.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the first tables."""
    op.create_table(
        "trees",
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("tree_id", sa.Text, primary_key=True),
        sa.Column("ended", sa.Boolean, nullable=False),
    )
    op.create_index(
        "trees_live", "trees", ["tenant_id", "tree_id"], sqlite_where=sa.text("ended = 0")
    )
    op.create_table(
        "records",
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("tree_id", sa.Text, primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("invocation_id", sa.Text, nullable=False),
        sa.Column("time_us", sa.BigInteger, nullable=False),
        sa.Column("engine_version", sa.Integer, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "requests",
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("content_digest", sa.Text, nullable=False),
        sa.Column("answer_id", sa.Text, nullable=False),
    )
    op.create_table(
        "counters",
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    _make_invocations()
    _make_artifacts()


def _make_invocations() -> None:
    op.create_table(
        "invocations",
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("invocation_id", sa.Text, primary_key=True),
        sa.Column("tree_id", sa.Text, nullable=False),
        sa.Column("parent_id", sa.Text, nullable=False),
        sa.Column("depth", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("create_time_us", sa.BigInteger, nullable=False),
        sa.Column("end_time_us", sa.BigInteger, nullable=False),
        sa.Column("ordinal", sa.BigInteger, nullable=False),
        sa.Column("snapshot", sa.LargeBinary, nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_index(
        "invocations_by_tree",
        "invocations",
        ["tenant_id", "tree_id", "ordinal", "invocation_id"],
    )
    op.create_index(
        "invocations_by_time",
        "invocations",
        ["tenant_id", "create_time_us", "invocation_id"],
    )


def _make_artifacts() -> None:
    op.create_table(
        "artifacts",
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("artifact_id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("media_type", sa.Text, nullable=False),
        sa.Column("invocation_id", sa.Text, nullable=False),
        sa.Column("create_time_us", sa.BigInteger, nullable=False),
    )
    op.create_index(
        "artifacts_by_name",
        "artifacts",
        ["tenant_id", "invocation_id", "name"],
        unique=True,
        sqlite_where=sa.text("invocation_id != ''"),
    )
    op.create_index("artifacts_by_digest", "artifacts", ["tenant_id", "sha256"])
    op.create_table(
        "refusals",
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("invocation_id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("reason", sa.Text, nullable=False),
    )
