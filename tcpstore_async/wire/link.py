"""The layout of the data on a link: frames. `docs/links.md` specifies it.

Knows sizes and field positions. Must not know what a frame does to a session, nor keep any state. Integers are
little-endian.
"""

from struct import Struct
from typing import Final

VERSION: Final = 2
"""The version of the layout."""

PIECE_BYTES: Final = 32 * 1024
"""Longest payload of a frame, so that a long reply does not hold up others. A list of sessions may precede it."""

FRAME_HEAD_BYTES: Final = 8
"""Head of a frame, a u64: bits 0-31 are the session, 32-55 the payload's length, 56-63 the kind."""

LENGTH_SHIFT: Final = 32
KIND_SHIFT: Final = 56
SESSION_MASK: Final = 0xFFFFFFFF
LENGTH_MASK: Final = 0xFFFFFF

U16: Final = Struct("<H")
"""A port in a payload."""

U32: Final = Struct("<I")
"""A number in a payload."""

U64: Final = Struct("<Q")
"""A count of bytes in a payload."""

QUESTION: Final = Struct("<II")
"""The payload of EXAMINE."""

LINK: Final = 0
"""Session number of frames that concern the link itself."""

DATA: Final = 0
"""Bytes of the session's stream, cut anywhere."""
OPEN: Final = 1
"""A new session: u16 port, and the address of the rank on its host as text."""
CLOSE: Final = 2
"""The end of a session, or of the link: u8 reason."""
CREDIT: Final = 3
"""u32: how many more bytes of DATA may be sent for the session."""
GOING_AWAY: Final = 4
"""The server is about to stop and accepts no new sessions."""
SAME: Final = 5
"""u32 n, n x u32 session, and one payload: a DATA frame for each of them."""
DESCRIBE: Final = 6
"""What is known of a session's rank: `name=value` pairs, separated by zero bytes."""

ACK: Final = 7
"""On session 0: u64, how many bytes of frames the sender has taken so far, over all connections."""

EXAMINE: Final = 8
"""On session 0: the number of a question, and within how many milliseconds it is to be answered."""
EXAMINED: Final = 9
"""On session 0: u32, the number of the question, and what the processes of the client's ranks do, as JSON."""

DESCRIPTION_BYTES: Final = 1024
"""Longest payload of a DESCRIBE frame."""

END_OF_FILE: Final = b"\0"
"""Reason: the rank has ended its stream, but still receives. The server closes the session after its last reply."""
LOST: Final = b"\1"
"""Reason: the rank's connection, or the server's session, is gone."""
REFUSED: Final = b"\2"
"""Reason: a limit does not allow the session."""

REPORT_BYTES: Final = PIECE_BYTES - U32.size
"""Longest report in an EXAMINED frame."""

REPLY_CREDIT_BYTES: Final = 256 * 1024
"""Bytes of DATA that the server may send for a new session before any CREDIT."""

REQUEST_CREDIT_BYTES: Final = 32 * 1024
"""Bytes of DATA that the client may send for a new session before any CREDIT. Filled with the shortest commands, they
delay the link's other sessions by half a millisecond."""

VALUE_CREDIT_BYTES: Final = 256 * 1024
"""Most credit within a long value, whose bytes the server only stores."""

WINDOW_BYTES: Final = 1024 * 1024
"""Unacknowledged bytes from which no more DATA is put on a link."""

ACKNOWLEDGE_BYTES: Final = 1024
"""Bytes taken after which they are acknowledged with the next output."""

ACKNOWLEDGE_AT_ONCE: Final = 64 * 1024
"""Bytes taken after which they are acknowledged even if there is no other output."""

SAME_SESSIONS: Final = 1024
"""Most sessions of one SAME frame."""

MAX_FRAME_BYTES: Final = 4 + 4 * SAME_SESSIONS + PIECE_BYTES
"""Longest contents of a frame: those of a SAME."""

MAX_CREDIT: Final = 2**31 - 1
"""Most credit of a session at any time; a CREDIT that exceeds it is a protocol error."""
