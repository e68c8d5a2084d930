/* WordPiece (greedy longest match, Schuster and Nakajima 2012) and Unigram (the likeliest segmentation, Kudo 2018) over a
 * trie of the vocabulary. Texts come normalized and cut: pieces stand between bytes 0xFF, which UTF-8 does not have. Each
 * byte starts one walk in the trie, which is as deep as the longest token. */
#include <stdlib.h>

#include "tokenizer.h"

enum { ZP_SEPARATOR = 0xFF, ZP_FIRST_NODES = 1 << 12 };

struct zp {
    zt trie;               /* only its trie is used */
    double *scores;        /* [num_tokens] of a Unigram, else NULL */
    double unknown_score;
    uint32_t continuing;   /* WordPiece: the node that continuing tokens begin at; ZT_NONE: there are none */
    uint32_t num_tokens;
    int64_t unknown, max_characters;
    int32_t byte_ids[256]; /* Unigram: tokens of single bytes; all -1 where characters are not taken apart */
};

void zp_free(zp *p)
{
    if (!p) return;
    free(p->trie.edges);
    free(p->trie.node_token);
    free(p->scores);
    free(p);
}

static uint32_t step(const zp *p, uint32_t node, uint8_t byte)
{
    const zt_edge *edge = zt_edge_of(p->trie.edges, p->trie.head.edges_size, node, byte);
    return edge && edge->key ? edge->child : ZT_NONE;
}

static int64_t id_at(const zp *p, uint32_t node) { return (int64_t)p->trie.node_token[node] - 1; }

/* tokens: `num` times a u64 length and the bytes; an empty one is found in no text. scores: f64 of a Unigram, or NULL.
 * prefix: what continuing tokens of a WordPiece begin with. byte_ids: i32 [256] or NULL. */
zp *zp_new(const uint8_t *tokens, uint64_t tokens_bytes, uint64_t num, const double *scores, double unknown_score,
           int64_t unknown, const uint8_t *prefix, uint64_t prefix_bytes, int64_t max_characters, const int32_t *byte_ids,
           zt_error *error)
{
    zp *p = calloc(1, sizeof *p);
    if (!p || num > ZT_MAX_TOKENS) goto memory;
    p->num_tokens = (uint32_t)num;
    p->unknown = unknown;
    p->unknown_score = unknown_score;
    p->max_characters = max_characters;
    for (int byte = 0; byte < 256; byte++) p->byte_ids[byte] = byte_ids ? byte_ids[byte] : -1;
    if (scores) {
        p->scores = malloc(8 * num + 8);
        if (!p->scores) goto memory;
        memcpy(p->scores, scores, 8 * num);
    }
    p->trie.head.num_nodes = 1;
    if (!zt_grow_trie(&p->trie, 2 * ZP_FIRST_NODES, ZP_FIRST_NODES)) goto memory;
    p->trie.node_token[0] = 0;
    uint64_t at = 0;
    for (uint64_t id = 0; id < num; id++) {
        uint64_t bytes;
        if (tokens_bytes - at < 8) goto ends;
        memcpy(&bytes, tokens + at, 8);
        if (bytes > tokens_bytes - at - 8) goto ends;
        if (bytes > ZT_MAX_SPECIAL_BYTES) {
            zt_fail(error, 0, at, "a token longer than 1024 bytes");
            goto refused;
        }
        if (bytes && !zt_add_special(&p->trie, (uint32_t)id, tokens + at + 8, bytes)) goto memory;
        at += 8 + bytes;
    }
    uint32_t node = 0;
    for (uint64_t i = 0; i < prefix_bytes && node != ZT_NONE; i++) node = step(p, node, prefix[i]);
    p->continuing = node;
    return p;
ends:
    zt_fail(error, 0, at, "the array ends inside a token");
    goto refused;
memory:
    zt_fail(error, -1, 0, "not enough memory, or a vocabulary of too many characters");
refused:
    zp_free(p);
    return NULL;
}

typedef struct { int32_t *ids; uint64_t count, capacity; } ids_list;

static int push(ids_list *out, int64_t id)
{
    if (out->count == out->capacity) {
        uint64_t capacity = 2 * out->capacity + 64;
        int32_t *ids = realloc(out->ids, capacity * sizeof *ids);
        if (!ids) return 0;
        out->ids = ids;
        out->capacity = capacity;
    }
    out->ids[out->count++] = (int32_t)id;
    return 1;
}

static size_t character(const uint8_t *text, size_t left)
{
    size_t bytes = *text < 0x80 ? 1 : *text < 0xE0 ? 2 : *text < 0xF0 ? 3 : 4;
    return bytes < left ? bytes : left;
}

/* The longest token at every place, or one unknown token for the whole word. */
static int word(const zp *p, const uint8_t *text, size_t bytes, ids_list *out)
{
    int64_t characters = 0;
    for (size_t i = 0; i < bytes; i++) characters += (text[i] & 0xC0) != 0x80;
    uint64_t before = out->count;
    size_t at = 0;
    while (characters <= p->max_characters && at < bytes) {
        uint32_t node = at ? p->continuing : 0;
        int64_t found = -1;
        size_t end = at;
        for (size_t i = at; i < bytes && node != ZT_NONE; i++) {
            node = step(p, node, text[i]);
            if (node == ZT_NONE) break;
            if (id_at(p, node) >= 0) {
                found = id_at(p, node);
                end = i + 1;
            }
        }
        if (found < 0) break;
        if (!push(out, found)) return 0;
        at = end;
    }
    if (at == bytes) return 1;
    out->count = before;
    return push(out, p->unknown);
}

typedef struct { double score; uint32_t start; int32_t id; } best;  /* of the segmentations that end at a byte */

static int unknown_run(const zp *p, const uint8_t *text, size_t bytes, ids_list *out)
{
    uint32_t node = 0;
    for (size_t i = 0; i < bytes && node != ZT_NONE; i++) node = step(p, node, text[i]);
    if (node != ZT_NONE && id_at(p, node) >= 0) return push(out, id_at(p, node));
    for (size_t i = 0; i < bytes; i++) {
        if (p->byte_ids[text[i]] < 0) return push(out, p->unknown);
    }
    for (size_t i = 0; i < bytes; i++) {
        if (!push(out, p->byte_ids[text[i]])) return 0;
    }
    return 1;
}

/* The segmentation of the highest sum of scores, of equal ones that which was found first; neighbouring characters that no
 * token covers are one unknown piece. `ends` and `cuts` have bytes + 1 entries. */
static int likeliest(const zp *p, const uint8_t *text, size_t bytes, best *ends, uint32_t *cuts, ids_list *out)
{
    for (size_t i = 1; i <= bytes; i++) ends[i].start = ZT_NONE;
    ends[0].score = 0;
    for (size_t at = 0; at < bytes;) {
        size_t next = at + character(text + at, bytes - at);
        int has_single = 0;
        uint32_t node = 0;
        for (size_t i = at; i < bytes; i++) {
            node = step(p, node, text[i]);
            if (node == ZT_NONE) break;
            int64_t id = id_at(p, node);
            if (id < 0) continue;
            double score = p->scores[id] + ends[at].score;
            best *end = &ends[i + 1];
            if (end->start == ZT_NONE || score > end->score) *end = (best){score, (uint32_t)at, (int32_t)id};
            has_single |= i + 1 == next;
        }
        double score = p->unknown_score + ends[at].score;
        if (!has_single && (ends[next].start == ZT_NONE || score > ends[next].score))
            ends[next] = (best){score, (uint32_t)at, -1};
        at = next;
    }
    size_t count = 0;
    for (size_t at = bytes; at; at = ends[at].start) cuts[count++] = (uint32_t)at;
    for (size_t at = 0; count; ) {
        size_t end = cuts[--count];
        if (ends[end].id >= 0) {
            if (!push(out, ends[end].id)) return 0;
        } else {
            while (count && ends[cuts[count - 1]].id < 0) end = cuts[--count];
            if (!unknown_run(p, text + at, end - at, out)) return 0;
        }
        at = end;
    }
    return 1;
}

/* Token ids of `text` in *out (to be released); returns how many, -1 out of memory, -2 a text of 2 GiB or more. */
int64_t zp_encode(const zp *p, const uint8_t *text, uint64_t bytes, int32_t **out)
{
    ids_list found = {NULL, 0, 0};
    best *ends = NULL;
    uint32_t *cuts = NULL;
    int ok = bytes < INT32_MAX;
    if (!ok) return -2;
    uint64_t longest = 0;
    for (uint64_t at = 0, start = 0; p->scores && at <= bytes; at++) {
        if (at < bytes && text[at] != ZP_SEPARATOR) continue;
        if (at - start > longest) longest = at - start;
        start = at + 1;
    }
    if (longest) {
        ends = malloc((longest + 1) * sizeof *ends);
        cuts = malloc((longest + 1) * sizeof *cuts);
        ok = ends && cuts;
    }
    for (uint64_t at = 0; ok && at < bytes;) {
        const uint8_t *stop = memchr(text + at, ZP_SEPARATOR, bytes - at);
        uint64_t end = stop ? (uint64_t)(stop - text) : bytes;
        if (end > at)
            ok = p->scores ? likeliest(p, text + at, end - at, ends, cuts, &found) : word(p, text + at, end - at, &found);
        at = end + 1;
    }
    free(ends);
    free(cuts);
    if (!ok) {
        free(found.ids);
        return -1;
    }
    *out = found.ids;
    return (int64_t)found.count;
}
