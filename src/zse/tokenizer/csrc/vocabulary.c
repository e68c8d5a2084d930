/* Reading a vocabulary: GGUF's arrays -> the tables of a zt. */
#include <stdlib.h>

#include "tokenizer.h"

static uint64_t power_of_two(uint64_t least)
{
    uint64_t size = 64;
    while (size < least) size *= 2;
    return size;
}

static unsigned bits_for(uint64_t count)
{
    unsigned bits = 1;
    while (count >> bits) bits++;
    return bits;
}

static int no_memory(zt_error *e) { return zt_fail(e, -1, 0, "out of memory"); }

/* The next string of a GGUF array; 0 when its length leaves the array. */
static int next_string(const uint8_t *array, uint64_t bytes, uint64_t *offset, const uint8_t **text, uint64_t *length)
{
    if (bytes - *offset < 8) return 0;
    *length = zt_word_at(array + *offset);
    if (*length > bytes - *offset - 8) return 0;
    *text = array + *offset + 8;
    *offset += 8 + *length;
    return 1;
}

/* --- token text ---------------------------------------------------------------------------------------------- */

/* GPT-2's byte alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 on. -1: not in it. */
static void byte_alphabet(int16_t byte_of[0x144])
{
    int extra = 0x100;
    for (int i = 0; i < 0x144; i++) byte_of[i] = -1;
    for (int b = 0; b < 256; b++) {
        int printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD);
        byte_of[printable ? b : extra++] = (int16_t)b;
    }
}

/* Writes the bytes that byte-alphabet text stands for; returns how many, or -1 when the text is not in the alphabet. */
static int64_t from_alphabet(const int16_t byte_of[0x144], const uint8_t *text, uint64_t bytes, uint8_t *out)
{
    int64_t n = 0;
    for (uint64_t i = 0; i < bytes;) {
        uint32_t code = text[i++];
        if (code >= 0x80) {
            if (code < 0xC2 || code > 0xC5 || i == bytes || (text[i] & 0xC0) != 0x80) return -1;
            code = (code & 0x1F) << 6 | (text[i++] & 0x3Fu);
        }
        if (code >= 0x144 || byte_of[code] < 0) return -1;
        out[n++] = (uint8_t)byte_of[code];
    }
    return n;
}

static uint64_t has_byte(uint64_t word, uint8_t byte)
{
    uint64_t v = word ^ 0x0101010101010101u * byte;
    return (v - 0x0101010101010101u) & ~v & 0x8080808080808080u;
}

/* SentencePiece text: U+2581 stands for a space. `readable` bytes may be read from text and written to out. */
static int64_t from_escaped(zt *t, const uint8_t *text, uint64_t bytes, uint64_t readable, uint8_t *out)
{
    int64_t n = 0;
    for (uint64_t i = 0; i < bytes;) {
        if (readable - i >= 8) {  /* eight bytes at once where none of them can be a space */
            uint64_t word = zt_word_at(text + i);
            if (!(has_byte(word, 0xE2) | has_byte(word, ' '))) {
                uint64_t step = bytes - i < 8 ? bytes - i : 8;
                memcpy(out + n, &word, 8);
                n += (int64_t)step;
                i += step;
                continue;
            }
        }
        int escaped = text[i] == 0xE2 && bytes - i >= 3 && text[i + 1] == 0x96 && text[i + 2] == 0x81;
        if ((escaped || text[i] == ' ') && n && out[n - 1] != ' ')
            t->head.before_space[out[n - 1] >> 3] |= (uint8_t)(1 << (out[n - 1] & 7));
        out[n++] = escaped ? ' ' : text[i];
        i += escaped ? 3 : 1;
    }
    return n;
}

/* Whether tokens are spelled in the alphabet of bytes. */
static int is_bytes(uint64_t model, uint64_t pre) { return model == ZT_MODEL_BPE && pre != ZT_PRE_TEXT; }

static int hex(int c)
{
    if (c >= '0' && c <= '9') return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The byte that "<0xNN>" names, or -1. */
static int named_byte(const uint8_t *text, uint64_t bytes)
{
    if (bytes != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    int high = hex(text[3]), low = hex(text[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* Hashes of the texts that are control tokens whatever their type says. */
typedef struct { uint8_t first[32]; uint64_t hashes[64], count; } zt_names;

static int read_names(const zt_source *s, zt_names *names, zt_error *e)
{
    uint64_t offset = 0, length;
    const uint8_t *text;
    *names = (zt_names){0};
    for (uint64_t i = 0; i < s->num_control; i++) {
        if (i == 64 || !next_string(s->control, s->control_bytes, &offset, &text, &length))
            return zt_fail(e, -1, 0, "bad list of control tokens");
        if (!length) continue;
        names->hashes[names->count++] = zt_hash(text, length);
        names->first[text[0] >> 3] |= (uint8_t)(1 << (text[0] & 7));
    }
    return 1;
}

static int is_named(const zt_names *names, const uint8_t *text, uint64_t bytes)
{
    if (!bytes || !(names->first[text[0] >> 3] >> (text[0] & 7) & 1)) return 0;
    uint64_t hash = zt_hash(text, bytes);
    for (uint64_t i = 0; i < names->count; i++) {
        if (names->hashes[i] == hash) return 1;
    }
    return 0;
}

/* Tokens on their way into the table: their slots are fetched from memory while the next ones are read. */
enum { NUM_PENDING = 16 };
typedef struct { uint64_t hashes[NUM_PENDING]; uint32_t ids[NUM_PENDING], count; } zt_pending;

static int insert(zt *t, uint32_t id, uint64_t hash)
{
    uint64_t slot = zt_text_slot(t, t->text + t->offsets[id], t->offsets[id + 1] - t->offsets[id], hash);
    uint32_t ids = (1u << t->head.id_bits) - 1;
    if (slot == ZT_NONE) return 0;
    t->table[slot] = ((uint32_t)(hash >> 32) & ~ids) | (id + 1);  /* of equal texts the last counts */
    return 1;
}

static int insert_later(zt *t, zt_pending *pending, uint32_t id, uint64_t hash)
{
    uint32_t at = pending->count++ % NUM_PENDING;
    int ok = pending->count <= NUM_PENDING || insert(t, pending->ids[at], pending->hashes[at]);
    __builtin_prefetch(&t->table[hash & (t->head.table_size - 1)], 1);
    pending->ids[at] = id;
    pending->hashes[at] = hash;
    return ok;
}

static int insert_pending(zt *t, const zt_pending *pending)
{
    uint32_t first = pending->count < NUM_PENDING ? 0 : pending->count - NUM_PENDING;
    for (uint32_t i = first; i < pending->count; i++) {
        if (!insert(t, pending->ids[i % NUM_PENDING], pending->hashes[i % NUM_PENDING])) return 0;
    }
    return 1;
}

static int read_tokens(zt *t, const zt_source *s, zt_error *e)
{
    int16_t byte_of[0x144];
    const char *collide = "token texts that collide in the hash table";
    zt_names names;
    zt_pending pending = {.count = 0};
    uint64_t offset = 0, length, used = 0, n = s->num_tokens;
    const uint8_t *text;
    if (!read_names(s, &names, e)) return 0;
    byte_alphabet(byte_of);
    for (uint64_t i = 0; i < s->num_control_ids; i++) {
        int32_t id;
        memcpy(&id, s->control_ids + 4 * i, 4);
        if (id >= 0 && (uint64_t)id < n) t->types[id] = ZT_CONTROL;
    }
    for (uint64_t id = 0; id < n; id++) {
        uint64_t begin = offset;
        if (!next_string(s->tokens, s->tokens_bytes, &offset, &text, &length))
            return zt_fail(e, 0, begin, "the length of a token's text leaves the array");
        int32_t type = ZT_NORMAL;
        if (s->types) {
            memcpy(&type, s->types + 4 * id, 4);
            if (type == 0) type = ZT_NORMAL;  /* "undefined", which old converters write */
            if (type < ZT_NORMAL || type > ZT_BYTE) return zt_fail(e, 2, 4 * id, "not a token type (0 to 6)");
        }
        if (type != ZT_CONTROL && is_named(&names, text, length)) type = ZT_CONTROL;
        if (t->types[id]) type = ZT_CONTROL;
        if (length == 0 && type != ZT_BYTE) type = ZT_UNUSED;  /* nothing to find in a text */
        uint8_t *out = t->text + used;
        int64_t written = -1;
        int in_table = type == ZT_NORMAL || type == ZT_UNUSED;
        if (type == ZT_BYTE) {
            int byte = named_byte(text, length);
            if (byte < 0) return zt_fail(e, 0, begin, "a byte token is not of the form <0xNN>");
            t->head.byte_ids[byte] = (uint32_t)id;
            out[0] = (uint8_t)byte;
            written = 1;
        } else if (in_table && is_bytes(s->model, s->pre)) {
            written = from_alphabet(byte_of, text, length, out);
        } else if (in_table) {
            written = from_escaped(t, text, length, s->tokens_bytes - (uint64_t)(text - s->tokens), out);
        }
        if (written < 0) {  /* special, or not in the byte alphabet: stands for itself and is not found in a text */
            memcpy(out, text, length);
            written = (int64_t)length;
            in_table = 0;
        }
        t->types[id] = (uint8_t)type;
        t->offsets[id] = (uint32_t)used;
        t->offsets[id + 1] = (uint32_t)(used + (uint64_t)written);
        if (type == ZT_CONTROL || type == ZT_UNKNOWN || type == ZT_USER_DEFINED) {
            if (length > ZT_MAX_SPECIAL_BYTES) return zt_fail(e, 0, begin, "a special token is longer than 1024 bytes");
            if (!zt_add_special(t, (uint32_t)id, text, length)) return zt_fail(e, 0, begin, "too many special tokens");
        } else if (in_table && written > 0) {
            if (!insert_later(t, &pending, (uint32_t)id, zt_hash(out, (size_t)written)))
                return zt_fail(e, 0, begin, collide);
            if ((uint64_t)written > t->head.max_token_bytes) t->head.max_token_bytes = (uint64_t)written;
            if (written == 1 && is_bytes(s->model, s->pre)) t->head.byte_ids[out[0]] = (uint32_t)id;
        }
        used += (uint64_t)written;
    }
    if (!insert_pending(t, &pending)) return zt_fail(e, 0, 0, collide);
    if (offset != s->tokens_bytes) return zt_fail(e, 0, offset, "bytes after the last token");
    t->head.text_bytes = used;
    return 1;
}

static int read_scores(zt *t, const zt_source *s, zt_error *e)
{
    if (s->num_scores != s->num_tokens) return zt_fail(e, 1, 0, "there is not one score for each token");
    for (uint64_t id = 0; id < s->num_tokens; id++) {
        float score;
        uint32_t bits;
        memcpy(&score, s->scores + 4 * id, 4);
        if (score != score) return zt_fail(e, 1, 4 * id, "a score is not a number");
        score += 0.0f;  /* -0 and 0 are one score */
        memcpy(&bits, &score, 4);
        t->ranks[id] = bits & 0x80000000u ? bits : ~(bits | 0x80000000u);  /* the higher score, the smaller rank */
    }
    return 1;
}

/* Token that one half of a merge names: in the table, or the id of a special token with `*special` set. */
static uint32_t merge_token(const zt *t, const uint8_t *raw, size_t raw_bytes, const uint8_t *text, size_t bytes,
                            int *special)
{
    int is_byte = raw_bytes == 1 && is_bytes(t->head.model, t->head.pre);
    uint32_t id = is_byte ? t->head.byte_ids[raw[0]] : zt_lookup(t, raw, raw_bytes);
    if (id != ZT_NONE) return id;
    id = zt_find_special(t, text, bytes);
    if (id != ZT_NONE) *special = 1;
    return id;
}

static int read_merges(zt *t, const zt_source *s, zt_error *e)
{
    int16_t byte_of[0x144];
    uint64_t offset = 0, length;
    const uint8_t *text;
    uint8_t *raw = malloc(s->merges_bytes + 1), *joined = malloc(s->merges_bytes + 1);
    uint32_t last = 0;
    int ok = raw && joined ? 1 : no_memory(e);
    byte_alphabet(byte_of);
    for (uint64_t rank = 0; ok && rank < s->num_merges; rank++) {
        uint64_t begin = offset;
        t->merges[rank] = (zt_merge){ZT_NONE, ZT_NONE, 0};
        if (!next_string(s->merges, s->merges_bytes, &offset, &text, &length)) {
            ok = zt_fail(e, 3, begin, "the length of a merge leaves the array");
            break;
        }
        const uint8_t *space = length > 1 ? memchr(text + 1, ' ', length - 1) : NULL;
        if (!space || space == text + length - 1) {
            ok = zt_fail(e, 3, begin, "a merge is not two texts with a space between them");
            break;
        }
        size_t left_length = (size_t)(space - text), right_length = length - left_length - 1;
        int64_t a, b;
        if (is_bytes(s->model, s->pre)) {
            a = from_alphabet(byte_of, text, left_length, raw);
            b = a < 0 ? -1 : from_alphabet(byte_of, space + 1, right_length, raw + a);
        } else {
            a = from_escaped(t, text, left_length, left_length, raw);
            b = from_escaped(t, space + 1, right_length, right_length, raw + a);
        }
        if (b < 0) continue;  /* not in the byte alphabet: no text leads there */
        memcpy(joined, text, left_length);
        memcpy(joined + left_length, space + 1, right_length);
        int special = 0;
        zt_merge merge;
        merge.left = merge_token(t, raw, (size_t)a, text, left_length, &special);
        merge.right = merge_token(t, raw + a, (size_t)b, space + 1, right_length, &special);
        last++;  /* vocabularies list the merged tokens in the order of the merges */
        if (last < s->num_tokens && t->types[last] == ZT_NORMAL && zt_has_text(t, last, raw, (size_t)(a + b)))
            merge.result = last;
        else merge.result = merge_token(t, raw, (size_t)(a + b), joined, left_length + right_length, &special);
        if (merge.left == ZT_NONE || merge.right == ZT_NONE || merge.result == ZT_NONE) {
            ok = zt_fail(e, 3, begin, "a merge names a text that is not in the vocabulary");
            break;
        }
        last = merge.result;
        if (special) continue;  /* special tokens are found in the text, never merged into being */
        uint64_t slot = zt_pair_slot(t, merge.left, merge.right);
        if (slot == ZT_NONE) {
            ok = zt_fail(e, 3, begin, "merges that collide in the hash table");
            break;
        }
        if (t->pairs[slot]) continue;  /* the first of two equal merges counts */
        t->merges[rank] = merge;
        uint64_t hash = zt_mix((uint64_t)merge.left << 32 | merge.right);
        t->pairs[slot] = ((uint32_t)(hash >> 32) & ~((1u << t->head.rank_bits) - 1)) | (uint32_t)(rank + 1);
    }
    if (ok && offset != s->merges_bytes) ok = zt_fail(e, 3, offset, "bytes after the last merge");
    free(raw);
    free(joined);
    return ok;
}

static int allocate(zt *t, const zt_source *s)
{
    uint64_t n = s->num_tokens;
    t->head.table_size = power_of_two(2 * n);
    t->head.id_bits = bits_for(n);
    t->offsets = malloc((n + 1) * 4);
    t->text = malloc(s->tokens_bytes + 8);
    t->types = calloc(n + 1, 1);
    t->table = calloc(t->head.table_size, 4);
    if (s->model == ZT_MODEL_SPM) {
        t->ranks = malloc(n * 4 + 4);
        if (!t->ranks) return 0;
    } else {
        t->head.num_merges = s->num_merges;
        t->head.pairs_size = power_of_two(2 * s->num_merges);
        t->head.rank_bits = bits_for(s->num_merges);
        t->merges = malloc((s->num_merges + 1) * sizeof *t->merges);
        t->pairs = calloc(t->head.pairs_size, 4);
        if (!t->merges || !t->pairs) return 0;
    }
    t->head.num_nodes = 1;
    return t->offsets && t->text && t->types && t->table && zt_grow_trie(t, 1024, 512) && (t->node_token[0] = 0, 1);
}

static int build(zt *t, const zt_source *s, zt_error *e)
{
    if (s->num_tokens == 0 || s->num_tokens > ZT_MAX_TOKENS)
        return zt_fail(e, 0, 0, "the number of tokens is not in 1 to 4194304");
    if (s->tokens_bytes > UINT32_MAX || s->num_tokens > s->tokens_bytes / 8)
        return zt_fail(e, 0, 0, "more tokens than the array can hold");
    if (s->types && s->num_types != s->num_tokens) return zt_fail(e, 2, 0, "there is not one type for each token");
    if (s->model == ZT_MODEL_BPE && (s->num_merges > ZT_MAX_TOKENS || s->num_merges > s->merges_bytes / 8))
        return zt_fail(e, 3, 0, "more merges than the array can hold");
    t->head.model = s->model;
    t->head.pre = s->pre;
    t->head.flags = s->flags;
    t->head.num_tokens = s->num_tokens;
    int has_unknown = s->unknown_id >= 0 && (uint64_t)s->unknown_id < s->num_tokens;
    t->head.unknown_id = has_unknown ? (uint64_t)s->unknown_id : ZT_NONE;
    memset(t->head.byte_ids, 0xFF, sizeof t->head.byte_ids);
    if (!allocate(t, s)) return no_memory(e);
    if (!read_tokens(t, s, e)) return 0;
    return s->model == ZT_MODEL_SPM ? read_scores(t, s, e) : read_merges(t, s, e);
}

/* Builds the tables of `source`, which may be freed afterwards; NULL with `error` filled when it is refused. */
zt *zt_new(const zt_source *source, zt_error *error)
{
    zt *t = calloc(1, sizeof *t);
    if (!t) {
        no_memory(error);
        return NULL;
    }
    if (build(t, source, error)) return t;
    zt_free(t);
    return NULL;
}

void zt_free(zt *t)
{
    if (!t) return;
    if (!t->is_image) {
        free(t->offsets);
        free(t->text);
        free(t->types);
        free(t->ranks);
        free(t->table);
        free(t->merges);
        free(t->pairs);
        free(t->edges);
        free(t->node_token);
    }
    free(t);
}

