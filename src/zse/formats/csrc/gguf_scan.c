/* Walks an array of strings (u64 little-endian length, bytes) to find where it ends. */
#include <stdint.h>

/* Walks up to `count` strings from data[0]. Returns how many; *consumed: the bytes they take.
 * Stops before a length that is not wholly inside data[0, nbytes), and before a string that would end beyond
 * `limit` (the bytes between data[0] and the end of the file). A walked string's bytes may lie beyond `nbytes`. */
uint64_t zse_gguf_scan_strings(const uint8_t *data, uint64_t nbytes, uint64_t count, uint64_t limit, uint64_t *consumed)
{
    uint64_t at = 0, walked = 0;
    while (walked < count && at <= nbytes && nbytes - at >= 8 && at <= limit && limit - at >= 8) {
        uint64_t length = 0;
        for (int i = 7; i >= 0; i--)
            length = length << 8 | data[at + i];
        if (length > limit - at - 8)
            break;
        at += 8 + length;
        walked++;
    }
    *consumed = at;
    return walked;
}
