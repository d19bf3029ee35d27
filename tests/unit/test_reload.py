"""Which settings a reload applies, and which wait for a restart."""

from __future__ import annotations

from msgspec.structs import replace

from shipper.config.settings import EndpointSettings, Settings
from shipper.pipeline.reload import reload_settings
from tests.cases import each

INTAKE = EndpointSettings(base_url="https://one.example.com", subscription_key="key", token="token")
OLD = Settings(intake=INTAKE)


@each(
    ("changes", "changed", "deferred"),
    [
        ({"token": "new"}, ["intake.token"], []),
        ({"proxy": "http://proxy.example.com"}, [], ["intake.proxy"]),
        # A token for another address must not be sent to this one.
        ({"base_url": "https://two.example.com", "token": "new"}, [], ["intake.base_url", "intake.token"]),
    ],
)
def test_new_credentials_apply_at_once_unless_the_address_changes(
    changes: dict[str, str], changed: list[str], deferred: list[str]
):
    reload = reload_settings(OLD, replace(OLD, intake=replace(INTAKE, **changes)))
    assert (reload.changed, reload.deferred) == (changed, deferred)
    applied = {name: value for name, value in changes.items() if f"intake.{name}" in changed}
    assert reload.settings.intake == replace(INTAKE, **applied)
