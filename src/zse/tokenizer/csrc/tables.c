/* The tables of a zt once they stand: text -> token, pair -> merge rank, the trie of special tokens, token -> text. */
#include <stdio.h>
#include <stdlib.h>

#include "tokenizer.h"

/* Fills `error` and returns 0. */
int zt_fail(zt_error *error, int64_t field, uint64_t offset, const char *reason)
{
    error->field = field;
    error->offset = (int64_t)offset;
    snprintf(error->reason, sizeof error->reason, "%s", reason);
    return 0;
}

static uint32_t half_at(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

uint64_t zt_mix(uint64_t h)
{
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93u;
    h ^= h >> 32;
    h *= 0x9E3779B97F4A7C15u;
    return h ^ h >> 32;  /* the low bits choose a slot, the high ones are its tag */
}

uint64_t zt_hash(const uint8_t *p, size_t n)
{
    uint64_t h = n * 0x9E3779B97F4A7C15u;
    for (; n > 16; p += 8, n -= 8) h = zt_mix(h ^ zt_word_at(p));
    if (n >= 8) return zt_mix(zt_mix(h ^ zt_word_at(p)) ^ zt_word_at(p + n - 8));
    if (n >= 4) return zt_mix(h ^ ((uint64_t)half_at(p) << 32 | half_at(p + n - 4)));
    if (n > 0) return zt_mix(h ^ ((uint32_t)p[0] << 16 | (uint32_t)p[n >> 1] << 8 | p[n - 1]));
    return zt_mix(h);
}

/* --- text -> token ------------------------------------------------------------------------------------------- */

int zt_has_text(const zt *t, uint32_t id, const uint8_t *text, size_t bytes)
{
    return t->offsets[id + 1] - t->offsets[id] == bytes && memcmp(t->text + t->offsets[id], text, bytes) == 0;
}

/* Slot of `text`: the one that holds it, or the free one where it belongs; ZT_NONE when the chain is too long. */
uint64_t zt_text_slot(const zt *t, const uint8_t *text, size_t bytes, uint64_t hash)
{
    uint64_t mask = t->head.table_size - 1;
    uint32_t ids = (1u << t->head.id_bits) - 1, tag = (uint32_t)(hash >> 32) & ~ids;
    uint64_t slot = hash & mask;
    for (int probe = 0; probe < ZT_MAX_PROBES; probe++, slot = (slot + 1) & mask) {
        uint32_t entry = t->table[slot];
        if (!entry || ((entry & ~ids) == tag && zt_has_text(t, (entry & ids) - 1, text, bytes))) return slot;
    }
    return ZT_NONE;
}

uint32_t zt_lookup(const zt *t, const uint8_t *text, size_t bytes)
{
    uint64_t slot = zt_text_slot(t, text, bytes, zt_hash(text, bytes));
    if (slot == ZT_NONE) return ZT_NONE;
    return (t->table[slot] & ((1u << t->head.id_bits) - 1)) - 1;  /* a free slot: 0 - 1 = ZT_NONE */
}

/* --- pair -> rank -------------------------------------------------------------------------------------------- */

uint64_t zt_pair_slot(const zt *t, uint32_t left, uint32_t right)
{
    uint64_t mask = t->head.pairs_size - 1, hash = zt_mix((uint64_t)left << 32 | right);
    uint32_t ranks = (1u << t->head.rank_bits) - 1, tag = (uint32_t)(hash >> 32) & ~ranks;
    uint64_t slot = hash & mask;
    for (int probe = 0; probe < ZT_MAX_PROBES; probe++, slot = (slot + 1) & mask) {
        uint32_t entry = t->pairs[slot];
        if (!entry) return slot;
        if ((entry & ~ranks) != tag) continue;
        const zt_merge *merge = &t->merges[(entry & ranks) - 1];
        if (merge->left == left && merge->right == right) return slot;
    }
    return ZT_NONE;
}

uint32_t zt_rank_of(const zt *t, uint32_t left, uint32_t right)
{
    uint64_t slot = zt_pair_slot(t, left, right);
    if (slot == ZT_NONE) return ZT_NONE;
    return (t->pairs[slot] & ((1u << t->head.rank_bits) - 1)) - 1;
}

/* --- trie of special tokens ---------------------------------------------------------------------------------- */

zt_edge *zt_edge_of(zt_edge *edges, uint64_t size, uint32_t node, uint8_t byte)
{
    uint32_t key = (node << 8 | byte) + 1;
    uint64_t slot = zt_mix(key) & (size - 1);
    for (int probe = 0; probe < ZT_MAX_PROBES; probe++, slot = (slot + 1) & (size - 1)) {
        if (!edges[slot].key || edges[slot].key == key) return &edges[slot];
    }
    return NULL;
}

int zt_grow_trie(zt *t, uint64_t size, uint64_t nodes)
{
    zt_edge *edges = calloc(size, sizeof *edges);
    uint32_t *node_token = realloc(t->node_token, nodes * sizeof *node_token);
    if (node_token) t->node_token = node_token;
    if (!edges || !node_token) {
        free(edges);
        return 0;
    }
    for (uint64_t i = 0; i < t->head.edges_size; i++) {
        if (!t->edges[i].key) continue;
        zt_edge *edge = zt_edge_of(edges, size, (t->edges[i].key - 1) >> 8, (uint8_t)((t->edges[i].key - 1) & 0xFF));
        if (!edge) {
            free(edges);
            return 0;
        }
        *edge = t->edges[i];
    }
    free(t->edges);
    t->edges = edges;
    t->head.edges_size = size;
    return 1;
}

int zt_add_special(zt *t, uint32_t id, const uint8_t *text, size_t bytes)
{
    uint32_t node = 0;
    for (size_t i = 0; i < bytes; i++) {
        /* There are num_nodes - 1 edges; node_token has room for half as many nodes as there are slots. */
        if (t->head.num_nodes >= t->head.edges_size / 2) {
            if (t->head.num_nodes >= ZT_MAX_NODES || !zt_grow_trie(t, t->head.edges_size * 2, t->head.edges_size))
                return 0;
        }
        zt_edge *edge = zt_edge_of(t->edges, t->head.edges_size, node, text[i]);
        if (!edge) return 0;
        if (!edge->key) {
            *edge = (zt_edge){(node << 8 | text[i]) + 1, (uint32_t)t->head.num_nodes};
            t->node_token[t->head.num_nodes++] = 0;
        }
        node = edge->child;
    }
    t->node_token[node] = id + 1;
    t->head.first[text[0] >> 3] |= (uint8_t)(1 << (text[0] & 7));
    if (bytes > t->head.max_special_bytes) t->head.max_special_bytes = bytes;
    return 1;
}

/* The longest special token that `text` begins with and that is at most `max` bytes, or ZT_NONE; control and unknown
 * tokens count only with `with_control`. */
uint32_t zt_special_at(const zt *t, const uint8_t *text, size_t bytes, int with_control, size_t max, size_t *length)
{
    uint32_t node = 0, found = ZT_NONE;
    if (bytes > max) bytes = max;
    if (bytes > t->head.max_special_bytes) bytes = t->head.max_special_bytes;
    for (size_t i = 0; i < bytes; i++) {
        const zt_edge *edge = zt_edge_of(t->edges, t->head.edges_size, node, text[i]);
        if (!edge || !edge->key) break;
        node = edge->child;
        uint32_t id = t->node_token[node] - 1;
        if (id != ZT_NONE && (with_control || t->types[id] == ZT_USER_DEFINED)) {
            found = id;
            *length = i + 1;
        }
    }
    return found;
}

uint32_t zt_find_special(const zt *t, const uint8_t *text, size_t bytes)
{
    size_t length = 0;
    uint32_t id = zt_special_at(t, text, bytes, 1, bytes, &length);
    return length == bytes ? id : ZT_NONE;
}

/* --- token -> text ---------------------------------------------------------------------------------------- */

/* Id of the token whose text (decoded) is `text`, special tokens first; -1: none. */
int64_t zt_find(const zt *t, const char *text, uint64_t bytes)
{
    uint32_t id = zt_find_special(t, (const uint8_t *)text, bytes);
    if (id == ZT_NONE) id = zt_lookup(t, (const uint8_t *)text, bytes);
    return id == ZT_NONE ? -1 : (int64_t)id;
}

/* Copies what a token decodes to; returns its length (copied only if it fits), -1 for an id outside the vocabulary. */
int64_t zt_token_bytes(const zt *t, int64_t id, uint8_t *out, uint64_t capacity)
{
    if (id < 0 || (uint64_t)id >= t->head.num_tokens) return -1;
    uint64_t bytes = t->offsets[id + 1] - t->offsets[id];
    if (bytes <= capacity) memcpy(out, t->text + t->offsets[id], bytes);
    return (int64_t)bytes;
}

int64_t zt_token_type(const zt *t, int64_t id)
{
    return id < 0 || (uint64_t)id >= t->head.num_tokens ? -1 : t->types[id];
}

/* Sets bit b of out[32] for each byte b that a control or unknown token begins with. */
void zt_control_first(const zt *t, uint8_t *out)
{
    memset(out, 0, 32);
    for (uint64_t id = 0; id < t->head.num_tokens; id++) {
        if ((t->types[id] != ZT_CONTROL && t->types[id] != ZT_UNKNOWN) || t->offsets[id] == t->offsets[id + 1])
            continue;
        uint8_t byte = t->text[t->offsets[id]];
        out[byte >> 3] |= (uint8_t)(1 << (byte & 7));
    }
}

/* Whether `text` ends inside a special token's text: what follows could complete it. */
int64_t zt_ends_inside(const zt *t, const uint8_t *text, uint64_t bytes)
{
    uint64_t longest = t->head.max_special_bytes;
    for (uint64_t begin = bytes > longest ? bytes - longest : 0; begin < bytes; begin++) {
        uint32_t node = 0;
        uint64_t i = begin;
        for (const zt_edge *edge; i < bytes && (edge = zt_edge_of(t->edges, t->head.edges_size, node, text[i]))
            && edge->key; i++)
            node = edge->child;
        if (i < bytes) continue;
        for (int byte = 0; byte < 256; byte++) {
            const zt_edge *edge = zt_edge_of(t->edges, t->head.edges_size, node, (uint8_t)byte);
            if (edge && edge->key) return 1;
        }
    }
    return 0;
}

int64_t zt_num_tokens(const zt *t) { return (int64_t)t->head.num_tokens; }

/* Bytes of `ids` in *out (to be released), without control and unknown tokens if asked; returns how many bytes,
 * -1 out of memory, -2 - i when ids[i] is outside the vocabulary. */
int64_t zt_decode(const zt *t, const int32_t *ids, uint64_t count, int64_t skip_special, uint8_t **out)
{
    uint64_t total = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || (uint64_t)ids[i] >= t->head.num_tokens) return -2 - (int64_t)i;
        if (skip_special && (t->types[ids[i]] == ZT_CONTROL || t->types[ids[i]] == ZT_UNKNOWN)) continue;
        total += t->offsets[ids[i] + 1] - t->offsets[ids[i]];
    }
    uint8_t *p = *out = malloc(total + 1);
    if (!p) return -1;
    for (uint64_t i = 0; i < count; i++) {
        if (skip_special && (t->types[ids[i]] == ZT_CONTROL || t->types[ids[i]] == ZT_UNKNOWN)) continue;
        uint32_t bytes = t->offsets[ids[i] + 1] - t->offsets[ids[i]];
        memcpy(p, t->text + t->offsets[ids[i]], bytes);
        p += bytes;
    }
    return (int64_t)total;
}

void zt_release(void *memory) { free(memory); }
