/* A zt as one block of bytes (little-endian, every part 64-byte aligned) that is used where it lies: for files that
 * are mapped. Data only; every index in it is checked before it is used. */
#include <stdlib.h>

#include "tokenizer.h"

static const char magic[16] = "ZSE tokenizer 1";
enum { NUM_PARTS = 9 };

static void parts_of(zt *t, void **where[NUM_PARTS], uint64_t bytes[NUM_PARTS])
{
    void **pointers[NUM_PARTS] = {(void **)&t->offsets, (void **)&t->text, (void **)&t->types, (void **)&t->ranks,
                                  (void **)&t->table, (void **)&t->merges, (void **)&t->pairs, (void **)&t->edges,
                                  (void **)&t->node_token};
    uint64_t n = t->head.num_tokens, is_spm = t->head.model == ZT_MODEL_SPM;
    uint64_t sizes[NUM_PARTS] = {4 * (n + 1), t->head.text_bytes, n, is_spm ? 4 * n : 0, 4 * t->head.table_size,
                                 sizeof(zt_merge) * t->head.num_merges, 4 * t->head.pairs_size,
                                 sizeof(zt_edge) * t->head.edges_size, 4 * t->head.num_nodes};
    memcpy(where, pointers, sizeof pointers);
    memcpy(bytes, sizes, sizeof sizes);
}

static uint64_t aligned(uint64_t offset) { return (offset + 63) & ~63ull; }

/* Writes the image of `t` and returns its size; writes nothing when it does not fit. */
int64_t zt_image(const zt *t, uint8_t *out, uint64_t capacity)
{
    zt copy = *t;
    void **where[NUM_PARTS];
    uint64_t bytes[NUM_PARTS], offset = aligned(sizeof magic + sizeof t->head), total = offset;
    parts_of(&copy, where, bytes);
    for (int i = 0; i < NUM_PARTS; i++) total += aligned(bytes[i]);
    if (total > capacity) return (int64_t)total;
    memset(out, 0, total);
    memcpy(out, magic, sizeof magic);
    memcpy(out + sizeof magic, &t->head, sizeof t->head);
    for (int i = 0; i < NUM_PARTS; i++) {
        if (bytes[i]) memcpy(out + offset, *where[i], bytes[i]);
        offset += aligned(bytes[i]);
    }
    return (int64_t)total;
}

static int refuse(zt_error *e, uint64_t offset, const char *reason) { return zt_fail(e, 4, offset, reason); }

static int is_size(uint64_t size, uint64_t most) { return size >= 64 && size <= most && (size & (size - 1)) == 0; }

static int check_head(const zt *t, zt_error *e)
{
    const uint64_t at = sizeof magic;
    if (t->head.model > ZT_MODEL_SPM || t->head.pre >= ZT_NUM_PRE) return refuse(e, at, "unknown kind of tokenizer");
    if (!t->head.num_tokens || t->head.num_tokens > ZT_MAX_TOKENS) return refuse(e, at, "number of tokens");
    if (t->head.text_bytes > UINT32_MAX || t->head.num_merges > ZT_MAX_TOKENS) return refuse(e, at, "size of a table");
    if (!is_size(t->head.table_size, 4 * ZT_MAX_TOKENS) || !is_size(t->head.edges_size, 4 * ZT_MAX_NODES))
        return refuse(e, at, "size of a hash table");
    if (t->head.model == ZT_MODEL_BPE ? !is_size(t->head.pairs_size, 4 * ZT_MAX_TOKENS) : t->head.pairs_size
        || t->head.num_merges)
        return refuse(e, at, "size of a hash table");
    if (!t->head.num_nodes || t->head.num_nodes > ZT_MAX_NODES) return refuse(e, at, "number of trie nodes");
    if (t->head.id_bits > 23 || t->head.num_tokens >> t->head.id_bits || t->head.rank_bits > 23
        || t->head.num_merges >> t->head.rank_bits)
        return refuse(e, at, "bits of an index");
    if (t->head.max_special_bytes > ZT_MAX_SPECIAL_BYTES) return refuse(e, at, "length of a special token");
    if (t->head.unknown_id != ZT_NONE && t->head.unknown_id >= t->head.num_tokens) return refuse(e, at, "token id");
    for (int b = 0; b < 256; b++) {
        if (t->head.byte_ids[b] != ZT_NONE && t->head.byte_ids[b] >= t->head.num_tokens)
            return refuse(e, at, "token id");
    }
    return 1;
}

static int check_parts(const zt *t, zt_error *e)
{
    uint64_t n = t->head.num_tokens;
    uint32_t ids = (1u << t->head.id_bits) - 1, ranks = (1u << t->head.rank_bits) - 1, bad = t->offsets[0] != 0;
    for (uint64_t i = 0; i < n; i++) bad |= t->offsets[i] > t->offsets[i + 1];
    if (bad || t->offsets[n] > t->head.text_bytes) return refuse(e, 0, "offsets of the token texts");
    for (uint64_t i = 0; i < n; i++) bad |= t->types[i] < ZT_NORMAL || t->types[i] > ZT_BYTE;
    if (bad) return refuse(e, 0, "token types");
    for (uint64_t i = 0; i < t->head.table_size; i++) {
        bad |= (t->table[i] & ids) > n || (t->table[i] && !(t->table[i] & ids));
    }
    if (bad) return refuse(e, 0, "table of token texts");
    for (uint64_t i = 0; i < t->head.num_merges; i++) bad |= t->merges[i].result >= n;
    if (bad) return refuse(e, 0, "merges");
    for (uint64_t i = 0; i < t->head.pairs_size; i++) {
        bad |= (t->pairs[i] & ranks) > t->head.num_merges || (t->pairs[i] && !(t->pairs[i] & ranks));
    }
    if (bad) return refuse(e, 0, "table of pairs");
    for (uint64_t i = 0; i < t->head.edges_size; i++) bad |= t->edges[i].child >= t->head.num_nodes;
    for (uint64_t i = 0; i < t->head.num_nodes; i++) bad |= t->node_token[i] > n;
    if (bad) return refuse(e, 0, "trie of special tokens");
    return 1;
}

/* A zt over an image that stays where it is (8-byte aligned) until zt_free; NULL with `error` filled when refused. */
zt *zt_open_image(const uint8_t *image, uint64_t bytes, zt_error *error)
{
    zt *t = calloc(1, sizeof *t);
    if (!t) {
        error->field = -1;
        return NULL;
    }
    t->is_image = 1;
    uint64_t offset = aligned(sizeof magic + sizeof t->head), sizes[NUM_PARTS];
    void **where[NUM_PARTS];
    if (bytes < offset || memcmp(image, magic, sizeof magic) != 0) {
        refuse(error, 0, "not a tokenizer image of this version");
        goto refused;
    }
    memcpy(&t->head, image + sizeof magic, sizeof t->head);
    if (!check_head(t, error)) goto refused;
    parts_of(t, where, sizes);
    for (int i = 0; i < NUM_PARTS; i++) {
        if (aligned(sizes[i]) > bytes - offset) {
            refuse(error, offset, "the image is too short for its tables");
            goto refused;
        }
        *where[i] = (void *)(uintptr_t)(image + offset);
        offset += aligned(sizes[i]);
    }
    if (check_parts(t, error)) return t;
refused:
    zt_free(t);
    return NULL;
}
