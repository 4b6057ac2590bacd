"""The layout of the data on a link: batches of frames. `docs/links.md` specifies it.

Knows sizes and field positions. Must not know what a frame does to a session, nor keep any state. Integers are
little-endian.
"""

from struct import Struct
from typing import Final

VERSION: Final = 1
"""The version of the layout."""

BATCH_HEAD: Final = Struct("<IIQQ")
"""Head of a batch: length of its frames, flags, its number, the highest number taken from the peer."""

BATCH_HEAD_BYTES: Final = 24

UNNUMBERED: Final = 1
"""Flag of a batch without frames and number, which acknowledges or shows that its sender is alive."""

BATCH_BYTES: Final = 64 * 1024
"""Length of its frames at which a batch is closed."""

PIECE_BYTES: Final = 32 * 1024
"""Longest payload of a frame, so that a long reply does not hold up others."""

FRAME_HEAD_BYTES: Final = 8
"""Head of a frame, a u64: bits 0-31 are the session, 32-55 the payload's length, 56-63 the kind."""

MAX_BATCH_BYTES: Final = BATCH_BYTES + FRAME_HEAD_BYTES + PIECE_BYTES
"""Longest batch that a receiver accepts: the last frame begins below `BATCH_BYTES` and may exceed it."""

LENGTH_SHIFT: Final = 32
KIND_SHIFT: Final = 56
SESSION_MASK: Final = 0xFFFFFFFF
LENGTH_MASK: Final = 0xFFFFFF

U16: Final = Struct("<H")
"""A port in a payload."""

U32: Final = Struct("<I")
"""A number in a payload."""

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

DESCRIPTION_BYTES: Final = 1024
"""Longest payload of a DESCRIBE frame."""

END_OF_FILE: Final = b"\0"
"""Reason: the rank has ended its stream, but still receives. The server closes the session after its last reply."""
LOST: Final = b"\1"
"""Reason: the rank's connection, or the server's session, is gone."""
REFUSED: Final = b"\2"
"""Reason: a limit does not allow the session."""

REPLY_CREDIT_BYTES: Final = 256 * 1024
"""Bytes of DATA that the server may send for a new session before any CREDIT."""

REQUEST_CREDIT_BYTES: Final = 32 * 1024
"""Bytes of DATA that the client may send for a new session before any CREDIT. Filled with the shortest commands, they
delay the link's other sessions by half a millisecond."""

VALUE_CREDIT_BYTES: Final = 256 * 1024
"""Most credit within a long value, whose bytes the server only stores."""

WINDOW_BYTES: Final = 1024 * 1024
"""Unacknowledged bytes from which no more DATA is put on a link."""

ACKNOWLEDGE_BYTES: Final = WINDOW_BYTES // 4
"""Bytes received after which a batch is sent to acknowledge them, if no other is."""

SAME_SESSIONS: Final = 1024
"""Most sessions of one SAME frame."""

SAME_BYTES: Final = 4 * 1024
"""Longest payload that a SAME frame repeats, without the numbers of the sessions."""

MAX_CREDIT: Final = 2**31 - 1
"""Most credit of a session at any time; a CREDIT that exceeds it is a protocol error."""
