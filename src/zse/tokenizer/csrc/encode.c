/* Text -> token ids. Special tokens are cut out first; what is between them is merged pair by pair, the best pair
 * first, with a linked list of symbols and a heap of pairs: O(n log n) in the longest piece. */
#include <stdlib.h>

#include "tokenizer.h"

typedef struct { uint32_t start, length, id, previous, next; } zt_symbol; /* length 0: merged away */
typedef struct { uint64_t key; uint32_t result, unused; } zt_pair;        /* key: rank << 32 | symbol on the left */

typedef struct {
    const zt *t;
    int32_t *ids;
    uint64_t num_ids, max_ids;
    zt_symbol *symbols;
    zt_pair *heap;
    uint64_t max_symbols, heap_size, max_heap;
    int failed; /* out of memory */
} zt_work;

static int reserve(void **memory, uint64_t *capacity, uint64_t needed, size_t item)
{
    if (needed <= *capacity) return 1;
    uint64_t size = *capacity * 2 > needed ? *capacity * 2 : needed + 64;
    void *grown = realloc(*memory, size * item);
    if (!grown) return 0;
    *memory = grown;
    *capacity = size;
    return 1;
}

static void emit(zt_work *w, uint32_t id)
{
    if (!reserve((void **)&w->ids, &w->max_ids, w->num_ids + 1, sizeof *w->ids)) w->failed = 1;
    else w->ids[w->num_ids++] = (int32_t)id;
}

static void push(zt_work *w, zt_pair pair)
{
    if (!reserve((void **)&w->heap, &w->max_heap, w->heap_size + 1, sizeof *w->heap)) {
        w->failed = 1;
        return;
    }
    uint64_t i = w->heap_size++;
    while (i && w->heap[(i - 1) / 2].key > pair.key) {
        w->heap[i] = w->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    w->heap[i] = pair;
}

static zt_pair pop(zt_work *w)
{
    zt_pair top = w->heap[0], last = w->heap[--w->heap_size];
    uint64_t i = 0, child;
    while ((child = 2 * i + 1) < w->heap_size) {
        if (child + 1 < w->heap_size && w->heap[child + 1].key < w->heap[child].key) child++;
        if (w->heap[child].key >= last.key) break;
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = last;
    return top;
}

/* `id` where a user's text may become it: never a control or unknown token, whatever a crafted table or image says. */
static uint32_t plain(const zt *t, uint32_t id)
{
    return id == ZT_NONE || t->types[id] == ZT_CONTROL || t->types[id] == ZT_UNKNOWN ? ZT_NONE : id;
}

static uint32_t plain_token(const zt *t, const uint8_t *text, uint64_t bytes) { return plain(t, zt_lookup(t, text, bytes)); }

/* What stands for a character without a token: of type unknown, or of a name that says so; an end of turn never does. */
static uint32_t unknown_token(const zt *t)
{
    uint32_t id = (uint32_t)t->head.unknown_id;
    if (id == ZT_NONE || t->types[id] != ZT_CONTROL) return id;
    for (uint32_t i = t->offsets[id]; i + 3 <= t->offsets[id + 1]; i++) {
        if ((t->text[i] | 32) == 'u' && (t->text[i + 1] | 32) == 'n' && (t->text[i + 2] | 32) == 'k') return id;
    }
    return ZT_NONE;
}

/* Puts the pair of symbol `left` and the one after it into the heap, if they make a token. */
static void consider(zt_work *w, const uint8_t *text, uint32_t left)
{
    const zt *t = w->t;
    const zt_symbol *a = &w->symbols[left];
    if (a->next == ZT_NONE) return;
    const zt_symbol *b = &w->symbols[a->next];
    uint32_t rank, result;
    if (t->head.model == ZT_MODEL_BPE) {
        if (a->id == ZT_NONE || b->id == ZT_NONE || (rank = zt_rank_of(t, a->id, b->id)) == ZT_NONE) return;
        result = plain(t, t->merges[rank].result);
        if (result == ZT_NONE) return;
    } else {
        uint64_t length = (uint64_t)a->length + b->length;
        if (length > t->head.max_token_bytes || (result = plain_token(t, text + a->start, length)) == ZT_NONE) return;
        rank = t->ranks[result];
    }
    push(w, (zt_pair){(uint64_t)rank << 32 | left, result, 0});
}

static int still_there(const zt_work *w, const zt_pair *pair)
{
    const zt_symbol *a = &w->symbols[(uint32_t)pair->key];
    if (!a->length || a->next == ZT_NONE) return 0;
    const zt_symbol *b = &w->symbols[a->next];
    if (w->t->head.model == ZT_MODEL_BPE) {
        const zt_merge *merge = &w->t->merges[pair->key >> 32];
        return merge->left == a->id && merge->right == b->id;
    }
    /* The left end never moves, so an equal length means an equal text. */
    return a->length + b->length == w->t->offsets[pair->result + 1] - w->t->offsets[pair->result];
}

static void merge_all(zt_work *w, const uint8_t *text, uint64_t count)
{
    w->heap_size = 0;
    for (uint64_t i = 0; i + 1 < count; i++) consider(w, text, (uint32_t)i);
    while (w->heap_size && !w->failed) {
        zt_pair best = pop(w);
        if (!still_there(w, &best)) continue;
        uint32_t left = (uint32_t)best.key;
        zt_symbol *a = &w->symbols[left], *b = &w->symbols[a->next];
        a->length += b->length;
        a->id = best.result;
        a->next = b->next;
        b->length = 0;
        if (a->next != ZT_NONE) w->symbols[a->next].previous = left;
        consider(w, text, left);
        if (a->previous != ZT_NONE) consider(w, text, a->previous);
    }
}

static void link(zt_work *w, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        w->symbols[i].previous = i ? (uint32_t)(i - 1) : ZT_NONE;
        w->symbols[i].next = i + 1 < count ? (uint32_t)(i + 1) : ZT_NONE;
    }
}

/* One piece of a pre-tokenized text. A byte that the vocabulary lacks joins nothing and makes no token. */
static void encode_word(zt_work *w, const uint8_t *text, uint64_t bytes)
{
    const zt *t = w->t;
    uint32_t whole;
    if (bytes == 1) {
        if (plain(t, t->head.byte_ids[text[0]]) != ZT_NONE) emit(w, t->head.byte_ids[text[0]]);
        return;
    }
    if (t->head.flags & ZT_IGNORE_MERGES && bytes <= t->head.max_token_bytes
        && (whole = plain_token(t, text, bytes)) != ZT_NONE) {
        emit(w, whole);
        return;
    }
    if (!reserve((void **)&w->symbols, &w->max_symbols, bytes, sizeof *w->symbols)) {
        w->failed = 1;
        return;
    }
    for (uint64_t i = 0; i < bytes; i++)
        w->symbols[i] = (zt_symbol){(uint32_t)i, 1, plain(t, t->head.byte_ids[text[i]]), 0, 0};
    link(w, bytes);
    merge_all(w, text, bytes);
    for (uint32_t i = 0; i != ZT_NONE && !w->failed; i = w->symbols[i].next) {
        if (w->symbols[i].id != ZT_NONE) emit(w, w->symbols[i].id);
    }
}

static uint64_t character_bytes(const uint8_t *p, uint64_t left)
{
    uint64_t n = p[0] < 0xC2 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : p[0] < 0xF5 ? 4 : 1;
    if (n > left) return 1;
    for (uint64_t i = 1; i < n; i++) {
        if ((p[i] & 0xC0) != 0x80) return 1;
    }
    return n;
}

/* A part of a SentencePiece text that no token leaves. What no token covers becomes byte tokens, or the unknown
 * token. */
static void encode_part(zt_work *w, const uint8_t *text, uint64_t bytes)
{
    const zt *t = w->t;
    uint64_t count = 0;
    if (!reserve((void **)&w->symbols, &w->max_symbols, bytes, sizeof *w->symbols)) {
        w->failed = 1;
        return;
    }
    for (uint64_t i = 0; i < bytes;) {
        uint64_t n = character_bytes(text + i, bytes - i);
        w->symbols[count++] = (zt_symbol){(uint32_t)i, (uint32_t)n, plain_token(t, text + i, n), 0, 0};
        i += n;
    }
    link(w, count);
    merge_all(w, text, count);
    for (uint32_t i = 0; i != ZT_NONE && !w->failed; i = w->symbols[i].next) {
        const zt_symbol *symbol = &w->symbols[i];
        if (symbol->id != ZT_NONE) {
            emit(w, symbol->id);
            continue;
        }
        for (uint32_t k = 0; k < symbol->length; k++) {
            uint32_t id = plain(t, t->head.byte_ids[text[symbol->start + k]]);
            if (id == ZT_NONE) id = plain_token(t, text + symbol->start + k, 1);
            if (id == ZT_NONE) id = unknown_token(t);
            if (id != ZT_NONE) emit(w, id);
        }
    }
}

static int has_bit(const uint8_t set[32], uint8_t byte) { return set[byte >> 3] >> (byte & 7) & 1; }

/* Cuts before spaces where no token goes across, so that the heap stays as small as a word. */
static void encode_parts(zt_work *w, const uint8_t *text, uint64_t bytes)
{
    uint64_t begin = 0;
    for (uint64_t i = 1; i <= bytes && !w->failed; i++) {
        if (i < bytes && (text[i] != ' ' || text[i - 1] == ' ' || has_bit(w->t->head.before_space, text[i - 1])))
            continue;
        encode_part(w, text + begin, i - begin);
        begin = i;
    }
}

static void encode_fragment(zt_work *w, const uint8_t *text, uint64_t bytes, int after_special)
{
    const zt *t = w->t;
    if (t->head.model == ZT_MODEL_SPM) {
        if (!(t->head.flags & ZT_ADD_SPACE_PREFIX) || !after_special) {
            encode_parts(w, text, bytes);
            return;
        }
        uint8_t *prefixed = malloc(bytes + 1);
        if (!prefixed) {
            w->failed = 1;
            return;
        }
        prefixed[0] = ' ';
        memcpy(prefixed + 1, text, bytes);
        encode_parts(w, prefixed, bytes + 1);
        free(prefixed);
        return;
    }
    if (t->head.pre == ZT_PRE_TEXT) {
        for (uint64_t p = 0, end; p < bytes && !w->failed; p = end) {
            uint32_t whole = ZT_NONE;
            for (end = p + 1; end < bytes && (text[end] == '\n') == (text[p] == '\n');) end++;
            if (text[p] == '\n' && end - p <= t->head.max_token_bytes) whole = plain_token(t, text + p, end - p);
            if (whole != ZT_NONE) emit(w, whole);
            else encode_parts(w, text + p, end - p);
        }
        return;
    }
    zt_scan scan;
    zt_scan_start(&scan, (int)t->head.pre, text, bytes);
    for (size_t p = 0; p < bytes && !w->failed;) {
        size_t end = zt_scan_next(&scan, p);
        encode_word(w, text + p, end - p);
        p = end;
    }
}

/* Token ids of `text` in *out (to be released); returns how many, -1 out of memory, -2 when the text is 2 GiB or more.
 * User-defined tokens are found anywhere; control and unknown ones with ZT_SPECIAL, unless a barrier (a byte offset,
 * ascending) is inside them. */
int64_t zt_encode(const zt *t, const uint8_t *text, uint64_t bytes, int64_t flags, const int64_t *barriers,
                  uint64_t num_barriers, int32_t **out)
{
    zt_work w = {.t = t};
    uint64_t begin = 0, barrier = 0;
    int after_special = 1;
    *out = NULL;
    if (bytes > INT32_MAX) return -2;
    if (!reserve((void **)&w.ids, &w.max_ids, bytes / 3 + 8, sizeof *w.ids)) return -1;
    for (uint64_t p = 0; p < bytes && !w.failed;) {
        if (!has_bit(t->head.first, text[p])) {
            p++;
            continue;
        }
        while (barrier < num_barriers && barriers[barrier] <= (int64_t)p) barrier++;
        size_t length = 0;
        uint64_t clear = barrier < num_barriers ? (uint64_t)barriers[barrier] - p : bytes - p;
        uint32_t id = flags & ZT_SPECIAL ? zt_special_at(t, text + p, bytes - p, 1, clear, &length) : ZT_NONE;
        if (id == ZT_NONE || clear < bytes - p) {  /* a user-defined token may go across a barrier */
            size_t longer = 0;
            uint32_t other = zt_special_at(t, text + p, bytes - p, 0, bytes - p, &longer);
            if (other != ZT_NONE && longer > length) {
                id = other;
                length = longer;
            }
        }
        if (id == ZT_NONE) {
            p++;
            continue;
        }
        if (p > begin) encode_fragment(&w, text + begin, p - begin, after_special);
        emit(&w, id);
        after_special = 1;
        begin = p += length;
    }
    if (bytes > begin && !w.failed) encode_fragment(&w, text + begin, bytes - begin, after_special);
    free(w.symbols);
    free(w.heap);
    if (w.failed) {
        free(w.ids);
        return -1;
    }
    *out = w.ids;
    return (int64_t)w.num_ids;
}
