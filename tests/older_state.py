"""How to make the state of an earlier version out of one of today: SQL."""

from typing import Final

BACK_TO_10: Final = """
DROP TABLE accepted_ids;
PRAGMA user_version = 10;
"""
BACK_TO_9: Final = f"""
{BACK_TO_10}
DROP TABLE ledger_expiry;
DROP INDEX parts_by_hour;
PRAGMA user_version = 9;
"""
BACK_TO_8: Final = f"""
{BACK_TO_9}
DROP INDEX letters_without_record;
ALTER TABLE dead_letters DROP COLUMN whole_bytes;
PRAGMA user_version = 8;
"""
BACK_TO_7: Final = f"""
{BACK_TO_8}
ALTER TABLE streams DROP COLUMN is_gone;
ALTER TABLE started_patterns DROP COLUMN started_at;
PRAGMA user_version = 7;
"""
BACK_TO_6: Final = f"""
{BACK_TO_7}
DROP TABLE ledger_parts;
PRAGMA user_version = 6;
"""
BACK_TO_5: Final = f"""
{BACK_TO_6}
DROP TABLE log_chain;
DROP TABLE expiry;
PRAGMA user_version = 5;
"""
BACK_TO_4: Final = f"""
{BACK_TO_5}
ALTER TABLE streams DROP COLUMN settled_until;
DROP TRIGGER letter_kept;
DROP TRIGGER letter_gone;
DROP TRIGGER letter_refused_anew;
DROP TABLE letter_counts;
PRAGMA user_version = 4;
"""
BACK_TO_3: Final = f"{BACK_TO_4} DROP TABLE ledger; PRAGMA user_version = 3;"
