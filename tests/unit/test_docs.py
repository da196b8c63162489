"""What the documents say is what the code does."""

from pathlib import Path

from infra.config_table import page

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_up_to_date():
    assert (ROOT / "docs/configuration.md").read_text() == page(), (
        "run: python -m infra.config_table > docs/configuration.md"
    )
