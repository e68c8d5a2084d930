/* Byte-pair tokenizers read from GGUF arrays: byte-level BPE with ranked merges ("gpt2") and SentencePiece BPE by
 * scores ("llama"). No global state: a zt is constant once made, so any number of threads may use one. */
#ifndef ZSE_TOKENIZER_H
#define ZSE_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ZT_EXPORT __attribute__((visibility("default")))

enum { ZT_MODEL_BPE = 0, ZT_MODEL_SPM = 1 };

/* Pre-tokenizers; the numbers are those of the table in bpe.py. */
enum {
    ZT_PRE_NONE, ZT_PRE_GPT2, ZT_PRE_SMOLLM, ZT_PRE_LLAMA3, ZT_PRE_QWEN2, ZT_PRE_TEKKEN, ZT_PRE_DEFAULT, ZT_PRE_O200K,
    ZT_PRE_TEXT, /* merges of UTF-8 text, not of bytes: spaces are U+2581, lines and newlines stand apart (Gemma 4) */
    ZT_PRE_DEEPSEEK3, ZT_PRE_QWEN35, ZT_PRE_MINICPM5, ZT_PRE_SEED, ZT_PRE_KIMI, ZT_PRE_DEEPSEEK_LLM,
    ZT_NUM_PRE
};

/* Token types as GGUF writes them. */
enum { ZT_NORMAL = 1, ZT_UNKNOWN = 2, ZT_CONTROL = 3, ZT_USER_DEFINED = 4, ZT_UNUSED = 5, ZT_BYTE = 6 };

enum { ZT_ADD_SPACE_PREFIX = 1, ZT_IGNORE_MERGES = 2 };  /* zt_source.flags */
enum { ZT_SPECIAL = 1 };                                /* zt_encode flags */

/* Every member is 8 bytes, so that Python fills it as an array of 64-bit words. A string array is its GGUF payload:
 * u64 length and bytes, `num` times. Pointers need no alignment; all is copied. */
typedef struct {
    uint64_t model, pre, flags;
    const uint8_t *tokens; uint64_t tokens_bytes, num_tokens;
    const uint8_t *scores; uint64_t num_scores;                  /* f32 */
    const uint8_t *types; uint64_t num_types;                    /* i32 */
    const uint8_t *merges; uint64_t merges_bytes, num_merges;
    const uint8_t *control; uint64_t control_bytes, num_control; /* texts that are control tokens whatever their type */
    const uint8_t *control_ids; uint64_t num_control_ids;        /* i32 ids likewise */
    int64_t unknown_id;                                          /* -1: none */
} zt_source;

/* Why zt_new or zt_open_image refused. field: 0 tokens, 1 scores, 2 types, 3 merges, 4 image, -1 out of memory.
 * offset: bytes from the start of that array. */
typedef struct { int64_t field, offset; char reason[240]; } zt_error;

typedef struct { uint32_t left, right, result; } zt_merge;  /* token ids; a merge that is never made has left = ~0 */
typedef struct { uint32_t key, child; } zt_edge;            /* key: (node << 8 | byte) + 1, 0 when free; child: node */

#define ZT_MAX_TOKENS (1u << 22)
#define ZT_MAX_SPECIAL_BYTES 1024   /* of one control, unknown or user-defined token */
#define ZT_MAX_NODES (1u << 22)
#define ZT_MAX_PROBES 256           /* of one hash-table chain; more is a crafted file */
#define ZT_NONE UINT32_MAX

typedef struct zt {
    /* `head` is stored in an image as it stands. */
    struct {
        uint64_t model, pre, flags;
        uint64_t num_tokens, text_bytes, table_size, num_merges, pairs_size, edges_size, num_nodes;
        uint64_t id_bits, rank_bits, max_token_bytes, max_special_bytes;
        uint64_t unknown_id;                 /* ZT_NONE: none */
        uint32_t byte_ids[256];              /* the token that stands for a byte, ZT_NONE: none */
        uint8_t first[32];                   /* bit b: a special token begins with byte b */
        uint8_t before_space[32];            /* bit b: byte b (not a space) stands before a space inside a token */
    } head;
    uint32_t *offsets;   /* [num_tokens + 1] into text */
    uint8_t *text;       /* what each token decodes to */
    uint8_t *types;      /* [num_tokens] */
    uint32_t *ranks;     /* SPM [num_tokens]: smaller is merged first */
    uint32_t *table;     /* [table_size] text -> token: tag << id_bits | id + 1, of normal and unused tokens */
    zt_merge *merges;    /* BPE [num_merges] by rank */
    uint32_t *pairs;     /* BPE [pairs_size] (left, right) -> rank: tag << rank_bits | rank + 1 */
    zt_edge *edges;      /* [edges_size] trie of control, unknown and user-defined tokens */
    uint32_t *node_token; /* [num_nodes] id + 1, 0: none */
    int is_image;        /* the arrays belong to the caller */
} zt;

/* vocabulary.c */
ZT_EXPORT zt *zt_new(const zt_source *source, zt_error *error);
ZT_EXPORT void zt_free(zt *t);

static inline uint64_t zt_word_at(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* tables.c */
int zt_fail(zt_error *error, int64_t field, uint64_t offset, const char *reason);
ZT_EXPORT int64_t zt_find(const zt *t, const char *text, uint64_t bytes);
ZT_EXPORT int64_t zt_token_bytes(const zt *t, int64_t id, uint8_t *out, uint64_t capacity);
ZT_EXPORT int64_t zt_token_type(const zt *t, int64_t id);
ZT_EXPORT int64_t zt_num_tokens(const zt *t);
ZT_EXPORT void zt_control_first(const zt *t, uint8_t *out);
ZT_EXPORT int64_t zt_ends_inside(const zt *t, const uint8_t *text, uint64_t bytes);
ZT_EXPORT int64_t zt_decode(const zt *t, const int32_t *ids, uint64_t count, int64_t skip_special, uint8_t **out);
ZT_EXPORT void zt_release(void *memory);
uint64_t zt_hash(const uint8_t *text, size_t bytes);
uint64_t zt_mix(uint64_t hash);
int zt_has_text(const zt *t, uint32_t id, const uint8_t *text, size_t bytes);
uint64_t zt_text_slot(const zt *t, const uint8_t *text, size_t bytes, uint64_t hash);
uint64_t zt_pair_slot(const zt *t, uint32_t left, uint32_t right);
zt_edge *zt_edge_of(zt_edge *edges, uint64_t size, uint32_t node, uint8_t byte);
int zt_grow_trie(zt *t, uint64_t size, uint64_t nodes);
int zt_add_special(zt *t, uint32_t id, const uint8_t *text, size_t bytes);
uint32_t zt_find_special(const zt *t, const uint8_t *text, size_t bytes);
uint32_t zt_lookup(const zt *t, const uint8_t *text, size_t bytes);
uint32_t zt_rank_of(const zt *t, uint32_t left, uint32_t right);
uint32_t zt_special_at(const zt *t, const uint8_t *text, size_t bytes, int with_control, size_t max, size_t *length);

/* image.c */
ZT_EXPORT int64_t zt_image(const zt *t, uint8_t *out, uint64_t capacity);
ZT_EXPORT zt *zt_open_image(const uint8_t *image, uint64_t bytes, zt_error *error);

/* encode.c */
ZT_EXPORT int64_t zt_encode(const zt *t, const uint8_t *text, uint64_t bytes, int64_t flags, const int64_t *barriers,
                            uint64_t num_barriers, int32_t **out);

/* pieces.c */
typedef struct zp zp;
ZT_EXPORT zp *zp_new(const uint8_t *tokens, uint64_t tokens_bytes, uint64_t num, const double *scores,
                     double unknown_score, int64_t unknown, const uint8_t *prefix, uint64_t prefix_bytes,
                     int64_t max_characters, const int32_t *byte_ids, zt_error *error);
ZT_EXPORT void zp_free(zp *p);
ZT_EXPORT int64_t zp_encode(const zp *p, const uint8_t *text, uint64_t bytes, int32_t **out);

/* pretokenize.c */
typedef struct {
    const uint8_t *text;
    size_t end, piece_end, number_end; /* of the text, and of the parts that are split before the pattern is tried */
    size_t ends[6];                    /* likewise, of the parts that each pass of several makes */
    uint32_t first, last;              /* the last run of one class that was looked up */
    int run_class, pre;
} zt_scan;
void zt_scan_start(zt_scan *scan, int pre, const uint8_t *text, size_t bytes);
size_t zt_scan_next(zt_scan *scan, size_t position);
ZT_EXPORT int64_t zt_pretokenize(int64_t pre, const uint8_t *text, uint64_t bytes, int64_t *ends, uint64_t capacity);

#endif
