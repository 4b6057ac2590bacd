"""The layout of what travels on a link: batches of frames. `docs/links.md` specifies it.

This module knows sizes and field positions. It must not know what a frame does to a session, nor keep any state.
All integers are little-endian.
"""

from struct import Struct
from typing import Final

VERSION: Final = 1
"""The version of the layout."""

BATCH_HEAD: Final = Struct("<IIQQ")
"""Before the frames of a batch: their length, flags, the batch's number, the highest number taken from the peer."""

BATCH_HEAD_BYTES: Final = 24

UNNUMBERED: Final = 1
"""A flag: the batch has no frames and no number. It acknowledges, or shows that its sender is alive."""

BATCH_BYTES: Final = 64 * 1024
"""A batch is closed when its frames are this long."""

PIECE_BYTES: Final = 32 * 1024
"""Longest payload of a frame, so that a long reply does not hold up others."""

FRAME_HEAD_BYTES: Final = 8
"""Before the payload of a frame, a u64: bits 0-31 are the session, 32-55 the payload's length, 56-63 the kind."""

MAX_BATCH_BYTES: Final = BATCH_BYTES + FRAME_HEAD_BYTES + PIECE_BYTES
"""Longest batch that a receiver accepts: one that its last frame made long enough."""

LENGTH_SHIFT: Final = 32
KIND_SHIFT: Final = 56
SESSION_MASK: Final = 0xFFFFFFFF
LENGTH_MASK: Final = 0xFFFFFF

U16: Final = Struct("<H")
U32: Final = Struct("<I")
"""The numbers in payloads."""

LINK: Final = 0
"""The session number of frames that concern the link itself."""

DATA: Final = 0
"""Bytes of the session's stream, cut anywhere."""
OPEN: Final = 1
"""A new session: u16 port, and the address of the rank on its host as text."""
CLOSE: Final = 2
"""The end of a session, or of the link: u8 reason."""
CREDIT: Final = 3
"""u32: so many more bytes of DATA may be sent for the session."""
GOING_AWAY: Final = 4
"""The server is about to stop: no new sessions."""
SAME: Final = 5
"""u32 n, n x u32 session, and one payload: a DATA frame for each of them."""
DESCRIBE: Final = 6
"""What is known of the rank of a session: pairs `name=value`, with zero bytes between them."""

DESCRIPTION_BYTES: Final = 1024
"""Longest payload of a DESCRIBE frame."""

END_OF_FILE: Final = b"\0"
"""Reason: the rank sends no more, but still receives. The server closes the session after its last reply."""
LOST: Final = b"\1"
"""Reason: the rank's connection, or the server's session, is gone."""
REFUSED: Final = b"\2"
"""Reason: a limit does not allow the session."""

REPLY_CREDIT_BYTES: Final = 256 * 1024
"""Bytes of DATA that the server may send for a new session before any CREDIT."""

REQUEST_CREDIT_BYTES: Final = 32 * 1024
"""Bytes of DATA that the client may send for a new session before any CREDIT. The shortest commands in them delay the
link's other sessions by half a millisecond.
"""

VALUE_CREDIT_BYTES: Final = 256 * 1024
"""The most credit within a long value, whose bytes the server only has to store."""

WINDOW_BYTES: Final = 1024 * 1024
"""Unacknowledged bytes from which on no more DATA is put on a link."""

ACKNOWLEDGE_BYTES: Final = WINDOW_BYTES // 4
"""Bytes taken after which they are acknowledged, even if there is nothing else to send."""

SAME_SESSIONS: Final = 1024
"""Most sessions of one SAME frame."""

SAME_BYTES: Final = 4 * 1024
"""Longest payload of a SAME frame, without the numbers of the sessions."""

MAX_CREDIT: Final = 2**31 - 1
"""Most bytes that may be sent for a session at any time; a CREDIT that exceeds it must not be."""
