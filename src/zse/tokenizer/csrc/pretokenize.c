/* Pre-tokenizers: the patterns of published tokenizers as hand-written scanners that look at each character a
 * bounded number of times. Bytes that are not UTF-8 count as one character each, of no class. */
#include "tokenizer.h"
#include "unicode_table.h"

enum { OTHER, UPPER, LOWER, LETTER, MARK, NUMBER, PUNCTUATION, SYMBOL, SPACE, END };

#define IS_LETTER(c) ((c) >= UPPER && (c) <= LETTER)
#define IS_SYMBOL(c) ((c) == OTHER || (c) == MARK || (c) == PUNCTUATION || (c) == SYMBOL) /* [^\s\p{L}\p{N}] */
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

typedef struct { uint32_t first, last; } range;

static int class_of(zt_scan *s, uint32_t code)
{
    if (code >= s->first && code < s->last) return s->run_class;  /* text stays in one script for a while */
    size_t low = 0, high = NUM_CLASS_RUNS;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (class_runs[middle] >> 4 <= code) low = middle; else high = middle;
    }
    s->first = class_runs[low] >> 4;
    s->last = low + 1 < NUM_CLASS_RUNS ? class_runs[low + 1] >> 4 : 0x110000;
    s->run_class = (int)(class_runs[low] & 15);
    return s->run_class;
}

/* Code point and length at p, which is before the end; an invalid byte is code point 0x110000 of length 1. */
static uint32_t code_at(const uint8_t *p, size_t left, size_t *length)
{
    uint32_t b = p[0];
    *length = 1;
    if (b < 0x80) return b;
    if (b >= 0xC2 && b < 0xE0 && left >= 2 && (p[1] & 0xC0) == 0x80) {
        *length = 2;
        return (b & 0x1F) << 6 | (p[1] & 0x3Fu);
    }
    if (b >= 0xE0 && b < 0xF0 && left >= 3 && (p[1] & 0xC0) == 0x80 && (p[2] & 0xC0) == 0x80) {
        uint32_t code = (b & 0x0F) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
        if (code >= 0x800 && (code < 0xD800 || code > 0xDFFF)) {
            *length = 3;
            return code;
        }
    }
    if (b >= 0xF0 && b < 0xF5 && left >= 4 && (p[1] & 0xC0) == 0x80 && (p[2] & 0xC0) == 0x80 && (p[3] & 0xC0) == 0x80) {
        uint32_t code = (b & 0x07) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
        if (code >= 0x10000 && code < 0x110000) {
            *length = 4;
            return code;
        }
    }
    return 0x110000;
}

/* Class of the character at p within [p, end), and where the next one begins. */
static int at(zt_scan *s, size_t p, size_t end, size_t *next)
{
    if (p >= end) {
        *next = end;
        return END;
    }
    if (s->text[p] < 0x80) {
        *next = p + 1;
        return ascii_class[s->text[p]];
    }
    size_t length;
    uint32_t code = code_at(s->text + p, end - p, &length);
    *next = p + length;
    return code < 0x110000 ? class_of(s, code) : OTHER;
}

/* Code point at p, which is before the end. */
static uint32_t code_of(const zt_scan *s, size_t p, size_t end)
{
    size_t length;
    return code_at(s->text + p, end - p, &length);
}

static int is_in(const range *ranges, size_t count, uint32_t code)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].last < code) low = middle + 1; else high = middle;
    }
    return low < count && ranges[low].first <= code;
}

static int is_line_end(const zt_scan *s, size_t p) { return s->text[p] == '\r' || s->text[p] == '\n'; }

static size_t line_ends(const zt_scan *s, size_t p, size_t end)
{
    while (p < end && is_line_end(s, p)) p++;
    return p;
}

static size_t letters(zt_scan *s, size_t p, size_t end)
{
    size_t next;
    for (int c = at(s, p, end, &next); IS_LETTER(c); c = at(s, p, end, &next)) p = next;
    return p;
}

/* [\p{L}\p{M}]+ */
static size_t words(zt_scan *s, size_t p, size_t end)
{
    size_t next;
    for (int c = at(s, p, end, &next); IS_LETTER(c) || c == MARK; c = at(s, p, end, &next)) p = next;
    return p;
}

static size_t numbers(zt_scan *s, size_t p, size_t end, int most)
{
    size_t next;
    for (int n = 0; n < most && at(s, p, end, &next) == NUMBER; n++) p = next;
    return p;
}

static size_t symbols(zt_scan *s, size_t p, size_t end)
{
    size_t next;
    for (int c = at(s, p, end, &next); IS_SYMBOL(c); c = at(s, p, end, &next)) p = next;
    return p;
}

/* End of 's 't 're 've 'm 'll 'd at p, or p. With any_case also capitals and U+017F, which folds to s. */
static size_t contraction(const zt_scan *s, size_t p, size_t end, int any_case)
{
    const uint8_t *t = s->text + p;
    size_t left = end - p;
    if (left < 2 || t[0] != '\'') return p;
    int a = any_case && t[1] >= 'A' && t[1] <= 'Z' ? t[1] | 32 : t[1];
    int b = left < 3 ? 0 : any_case && t[2] >= 'A' && t[2] <= 'Z' ? t[2] | 32 : t[2];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return p + 3;
    if (any_case && a == 0xC5 && b == 0xBF) return p + 3;
    return p;
}

/* White space at p: [\s*[\r\n]+ |] \s+(?!\S) | \s+ */
static size_t spaces(zt_scan *s, size_t p, size_t end, int by_line)
{
    size_t q = p, next, last = p, after_line = p;
    while (at(s, q, end, &next) == SPACE) {
        if (s->text[q] == '\n' || s->text[q] == '\r') after_line = next;
        last = q;
        q = next;
    }
    if (by_line && after_line > p) return after_line;
    return q < end && last > p ? last : q;  /* the last white space before a word belongs to the word */
}

static size_t gpt2(zt_scan *s, size_t p, size_t end)
{
    size_t q = contraction(s, p, end, 0), next;
    if (q > p) return q;
    q = p;
    int c = at(s, p, end, &next);
    if (s->text[p] == ' ') {
        size_t after;
        int following = at(s, next, end, &after);
        if (following < SPACE) {
            c = following;
            q = next;
        }
    }
    if (IS_LETTER(c)) return letters(s, q, end);
    if (c == NUMBER) return numbers(s, q, end, INT32_MAX);
    if (c == SPACE) return spaces(s, p, end, 0);
    return symbols(s, q, end);
}

/* Llama 3 (digits by three), Qwen 2 (digits alone), Seed-OSS (line ends stay apart from symbols). */
static size_t llama3(zt_scan *s, size_t p, size_t end, int digits, int has_lines)
{
    size_t q = contraction(s, p, end, 1), next, after;
    if (q > p) return q;
    int c = at(s, p, end, &next);
    if (IS_LETTER(c)) return letters(s, p, end);
    if (c == NUMBER) return numbers(s, p, end, digits);
    int following = at(s, next, end, &after);
    if (IS_LETTER(following) && !is_line_end(s, p)) return letters(s, next, end);
    if (IS_SYMBOL(c) || (s->text[p] == ' ' && IS_SYMBOL(following))) {
        q = symbols(s, IS_SYMBOL(c) ? p : next, end);
        return has_lines ? line_ends(s, q, end) : q;
    }
    return spaces(s, p, end, 1);
}

/* Qwen 3.5: as Qwen 2, but marks are letters. */
static size_t qwen35(zt_scan *s, size_t p, size_t end)
{
    size_t q = contraction(s, p, end, 1), next, after;
    if (q > p) return q;
    int c = at(s, p, end, &next), following = at(s, next, end, &after);
    if (c == NUMBER) return next;
    if (!IS_LETTER(c) && !is_line_end(s, p) && (IS_LETTER(following) || following == MARK)) return words(s, next, end);
    if (IS_LETTER(c) || c == MARK) return words(s, p, end);
    int is_led = s->text[p] == ' ' && following != MARK && IS_SYMBOL(following);
    if (!is_led && c == SPACE) return spaces(s, p, end, 1);
    q = is_led ? next : p;
    for (c = at(s, q, end, &next); c != MARK && IS_SYMBOL(c); c = at(s, q, end, &next)) q = next;
    return line_ends(s, q, end);
}

/* \p{Han}, which is a script and no category. */
static const range han[] = {
    {0x2E80, 0x2E99}, {0x2E9B, 0x2EF3}, {0x2F00, 0x2FD5}, {0x3005, 0x3005}, {0x3007, 0x3007}, {0x3021, 0x3029},
    {0x3038, 0x303B}, {0x3400, 0x4DBF}, {0x4E00, 0x9FFF}, {0xF900, 0xFA6D}, {0xFA70, 0xFAD9}, {0x16FE2, 0x16FE3},
    {0x16FF0, 0x16FF1}, {0x20000, 0x2A6DF}, {0x2A700, 0x2B739}, {0x2B740, 0x2B81D}, {0x2B820, 0x2CEA1},
    {0x2CEB0, 0x2EBE0}, {0x2EBF0, 0x2EE5D}, {0x2F800, 0x2FA1D}, {0x30000, 0x3134A}, {0x31350, 0x323AF},
};

static int is_han(const zt_scan *s, size_t p, size_t end)
{
    return p < end && s->text[p] >= 0xE2 && is_in(han, COUNT(han), code_of(s, p, end));
}

/* at(), where characters that are in no word of this pattern count as none: Han of Kimi. */
static int at_word(zt_scan *s, size_t p, size_t end, size_t *next)
{
    int c = at(s, p, end, next);
    return s->pre == ZT_PRE_KIMI && c != END && is_han(s, p, end) ? OTHER : c;
}

/* [Lu Lt Lm Lo M]*[Ll Lm Lo M]+ or, when that fails, [Lu Lt Lm Lo M]+[Ll Lm Lo M]*, at p; p when both fail. */
static size_t cased_word(zt_scan *s, size_t p, size_t end)
{
    size_t q = p, next, after_both = p;
    int c = at_word(s, q, end, &next);
    for (; c == UPPER || c == LETTER || c == MARK; c = at_word(s, q, end, &next)) {
        if (c != UPPER) after_both = next;  /* the last character that both sets hold */
        q = next;
    }
    if (c == LOWER) {
        for (; c == LOWER || c == LETTER || c == MARK; c = at_word(s, q, end, &next)) q = next;
        return q;
    }
    return after_both > p ? after_both : q;
}

/* Whether the first of cased_word's two forms matches at p: it is tried with and without a leading character before
 * the second form is tried at all. */
static int has_lower_form(zt_scan *s, size_t p, size_t end)
{
    size_t next;
    int c = at_word(s, p, end, &next);
    for (; c == UPPER || c == LETTER || c == MARK; c = at_word(s, p, end, &next)) {
        if (c != UPPER) return 1;
        p = next;
    }
    return c == LOWER;
}

/* Tekken (digits alone) and o200k, of GPT-4o (digits by three; a contraction belongs to the word before it). */
static size_t tekken(zt_scan *s, size_t p, size_t end, int digits, int has_suffix)
{
    size_t next, after, q;
    int c = at(s, p, end, &next), following = at(s, next, end, &after), word = at_word(s, next, end, &after);
    int leads = !IS_LETTER(c) && c != NUMBER && !is_line_end(s, p);
    int is_led = leads && (IS_LETTER(word) || word == MARK) && (c != MARK || has_lower_form(s, next, end));
    if (is_led || IS_LETTER(c) || c == MARK) {
        q = cased_word(s, is_led ? next : p, end);
        return has_suffix ? contraction(s, q, end, 1) : q;
    }
    if (c == NUMBER) return numbers(s, p, end, digits);
    if (IS_SYMBOL(c) || (s->text[p] == ' ' && IS_SYMBOL(following))) {
        q = symbols(s, IS_SYMBOL(c) ? p : next, end);
        while (q < end && (is_line_end(s, q) || (s->text[q] == '/' && s->pre != ZT_PRE_KIMI))) q++;
        return q;
    }
    return spaces(s, p, end, 1);
}

/* Kimi K2: runs of Han, and o200k's words without Han. */
static size_t kimi(zt_scan *s, size_t p)
{
    size_t next, q = p;
    while (is_han(s, q, s->end)) {
        at(s, q, s->end, &next);
        q = next;
    }
    return q > p ? q : tekken(s, p, s->end, 3, 1);
}

static int is_default_punctuation(zt_scan *s, size_t p, size_t end, size_t *next)
{
    int c = at(s, p, end, next);
    return c == PUNCTUATION || (c == SYMBOL && s->text[p] < 0x80 && strchr("$+<=>^~|", s->text[p]));
}

/* llama.cpp's "default": punctuation runs, then GPT-2's words, then numbers, then digits by three, each splitting
 * what the one before left. */
static size_t by_default(zt_scan *s, size_t p)
{
    size_t next, q = p;
    if (p >= s->piece_end) {
        int punctuation = is_default_punctuation(s, p, s->end, &next);
        for (q = next; q < s->end && is_default_punctuation(s, q, s->end, &next) == punctuation; q = next) {}
        s->piece_end = q;
        if (punctuation) return q;
    }
    if (p >= s->number_end) {
        q = gpt2(s, p, s->piece_end);
        if (s->text[p] == ' ' && q > p + 1 && at(s, p + 1, s->piece_end, &next) == NUMBER) return p + 1;
        if (at(s, p, s->piece_end, &next) != NUMBER) return q;
        s->number_end = q;
    }
    for (size_t r = p; r < s->number_end; r = next) {
        int triple = s->number_end - r >= 3;
        for (size_t i = r; triple && i < r + 3; i++) triple = s->text[i] >= '0' && s->text[i] <= '9';
        if (triple) return r == p ? p + 3 : r;
        at(s, r, s->number_end, &next);
    }
    return s->number_end;
}

/* Whether DeepSeek V3 keeps the character at p apart from others: [\u4E00-\u9FA5\u3040-\u30FF]. */
static int is_east_asian(const zt_scan *s, size_t p)
{
    size_t length;
    if (s->text[p] < 0xE3 || s->text[p] > 0xE9) return 0;
    uint32_t code = code_at(s->text + p, s->end - p, &length);
    return (code >= 0x4E00 && code <= 0x9FA5) || (code >= 0x3040 && code <= 0x30FF);
}

/* DeepSeek V3's last pattern: [!-/:-~][A-Za-z]+ | [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+ | ?[\p{P}\p{S}]+[\r\n]* |
 * \s*[\r\n]+ | \s+(?!\S) | \s+ ; what none of them takes stays together. */
static size_t deepseek_words(zt_scan *s, size_t p, size_t end)
{
    size_t next, after, q;
    int c = at(s, p, end, &next), following = at(s, next, end, &after);
    if (s->text[p] < 0x80 && (c == PUNCTUATION || c == SYMBOL)) {
        for (q = next; q < end && ((s->text[q] | 32) >= 'a' && (s->text[q] | 32) <= 'z'); q++) {}
        if (q > next) return q;
    }
    int leads = !IS_LETTER(c) && c != PUNCTUATION && c != SYMBOL && !is_line_end(s, p);
    if (leads && (IS_LETTER(following) || following == MARK)) return words(s, next, end);
    if (IS_LETTER(c) || c == MARK) return words(s, p, end);
    int is_led = s->text[p] == ' ' && (following == PUNCTUATION || following == SYMBOL);
    if (is_led || c == PUNCTUATION || c == SYMBOL) {
        q = is_led ? next : p;
        for (c = at(s, q, end, &next); c == PUNCTUATION || c == SYMBOL; c = at(s, q, end, &next)) q = next;
        return line_ends(s, q, end);
    }
    if (c == SPACE) return spaces(s, p, end, 1);
    for (q = next; q < end; q = next) {  /* nothing takes it: up to where something is taken */
        c = at(s, q, end, &next);
        following = at(s, next, end, &after);
        if (c != OTHER || IS_LETTER(following) || following == MARK) break;
    }
    return q;
}

/* Numbers by three, runs of Chinese characters and kana, and what is between, each cut on its own. */
static size_t deepseek(zt_scan *s, size_t p)
{
    size_t next, q = p;
    if (p >= s->piece_end) {
        if (at(s, p, s->end, &next) == NUMBER) return numbers(s, p, s->end, 3);
        int apart = is_east_asian(s, p);
        while (q < s->end && at(s, q, s->end, &next) != NUMBER && is_east_asian(s, q) == apart) q = next;
        s->piece_end = q;
    }
    return deepseek_words(s, p, s->piece_end);
}

/* The sets of DeepSeek LLM's patterns: most letters that have a case, signs (with ASCII's letters), and East Asian
 * characters with all else from U+0800 to U+9FA5. */
static const range cased[] = {
    {0x41, 0x5A}, {0x61, 0x7A}, {0xB5, 0xB5}, {0xC0, 0xD6}, {0xD8, 0xF6}, {0xF8, 0x1BA}, {0x1BC, 0x1BF},
    {0x1C4, 0x293}, {0x295, 0x2AF}, {0x370, 0x373}, {0x376, 0x377}, {0x37B, 0x37D}, {0x37F, 0x37F}, {0x386, 0x386},
    {0x388, 0x38A}, {0x38C, 0x38C}, {0x38E, 0x3A1}, {0x3A3, 0x3F5}, {0x3F7, 0x481}, {0x48A, 0x52F}, {0x531, 0x556},
    {0x10A0, 0x10C5}, {0x13A0, 0x13F5}, {0x13F8, 0x13FD}, {0x1C90, 0x1CBA}, {0x1CBD, 0x1CBF}, {0x1D00, 0x1D2B},
    {0x1D6B, 0x1D77}, {0x1D79, 0x1D9A}, {0x1E00, 0x1F15}, {0x1F18, 0x1F1D}, {0x1F20, 0x1F45}, {0x1F48, 0x1F4D},
    {0x1F50, 0x1F57}, {0x1F59, 0x1F59}, {0x1F5B, 0x1F5B}, {0x1F5D, 0x1F5D}, {0x1F5F, 0x1F7D}, {0x1F80, 0x1FB4},
    {0x1FB6, 0x1FBC}, {0x1FBE, 0x1FBE}, {0x1FC2, 0x1FC4}, {0x1FC6, 0x1FCC}, {0x1FD0, 0x1FD3}, {0x1FD6, 0x1FDB},
    {0x1FE0, 0x1FEC}, {0x1FF2, 0x1FF4}, {0x1FF6, 0x1FFC}, {0x2102, 0x2102}, {0x2107, 0x2107}, {0x210A, 0x2113},
    {0x2115, 0x2115}, {0x2119, 0x211D}, {0x2124, 0x2124}, {0x2126, 0x2126}, {0x2128, 0x2128}, {0x212A, 0x212D},
    {0x212F, 0x2134}, {0x2139, 0x2139}, {0x213C, 0x213F}, {0x2145, 0x2149}, {0x214E, 0x214E}, {0x2183, 0x2184},
    {0x2C00, 0x2C7B}, {0x2C7E, 0x2CE4}, {0x2CEB, 0x2CEE}, {0x2CF2, 0x2CF3}, {0xA640, 0xA66D}, {0xA680, 0xA69B},
    {0xA722, 0xA76F}, {0xA771, 0xA787}, {0xA78B, 0xA78E}, {0xAB70, 0xABBF}, {0xFB00, 0xFB06}, {0xFB13, 0xFB17},
    {0xFF21, 0xFF3A}, {0xFF41, 0xFF5A}, {0x10400, 0x1044F}, {0x104B0, 0x104D3}, {0x104D8, 0x104FB},
    {0x10C80, 0x10CB2}, {0x10CC0, 0x10CF2}, {0x118A0, 0x118DF}, {0x1E900, 0x1E943},
};
static const range signs[] = {
    {0x21, 0x2F}, {0x3A, 0x7E}, {0x2018, 0x201F}, {0x3000, 0x3002}, {0xFF01, 0xFF0F}, {0xFF1A, 0xFF5E},
};
static const range eastern[] = {{0x800, 0x9FA5}, {0xAC00, 0xD7FF}};
enum { LINE, CASED, SIGNS, TRAILING, EASTERN, DIGITS, NUM_PASSES };

static size_t run_of(zt_scan *s, size_t p, size_t end, const range *set, size_t count, int may_be_led)
{
    size_t next, q = p;
    if (may_be_led && at(s, p, end, &next) == SPACE && next < end && is_in(set, count, code_of(s, next, end))) q = next;
    while (q < end && is_in(set, count, code_of(s, q, end))) {
        at(s, q, end, &next);
        q = next;
    }
    return q;
}

/* Where the match of a pass ends that begins at p, or p. Takes as long as the match. */
static size_t deepseek_match(zt_scan *s, int pass, size_t p, size_t end)
{
    switch (pass) {
    case LINE: return is_line_end(s, p) ? p + 1 : p;
    case CASED: return run_of(s, p, end, cased, COUNT(cased), 1);
    case SIGNS: return run_of(s, p, end, signs, COUNT(signs), 1);
    case EASTERN: return run_of(s, p, end, eastern, COUNT(eastern), 0);
    default: return numbers(s, p, end, INT32_MAX);
    }
}

/* DeepSeek LLM, V2-Lite: [\r\n], \s?cased+, \s?signs+, \s+$, eastern+, \p{N}+, each of which cuts what the one
 * before left. */
static size_t deepseek_llm(zt_scan *s, size_t p)
{
    size_t end = s->end, next;
    for (int pass = 0; pass < NUM_PASSES; pass++) {
        if (p >= s->ends[pass]) {
            size_t q = p;
            if (pass == TRAILING) {  /* up to the white space at the end; from there on, all of it */
                for (size_t r = p; r < end; r = next)
                    if (at(s, r, end, &next) != SPACE) q = next;
                if (q == p) q = end;
            } else {
                q = deepseek_match(s, pass, p, end);
                if (q == p) {
                    do {
                        at(s, q, end, &next);
                        q = next;
                    } while (q < end && deepseek_match(s, pass, q, end) == q);
                }
            }
            s->ends[pass] = q;
        }
        end = s->ends[pass];
    }
    return end;
}

void zt_scan_start(zt_scan *scan, int pre, const uint8_t *text, size_t bytes)
{
    *scan = (zt_scan){.text = text, .end = bytes, .pre = pre};
}

/* End of the piece that begins at `position` (before the end). To be called from 0 on, piece by piece. */
size_t zt_scan_next(zt_scan *s, size_t p)
{
    size_t next;
    switch (s->pre) {
    case ZT_PRE_GPT2: return gpt2(s, p, s->end);
    case ZT_PRE_LLAMA3: return llama3(s, p, s->end, 3, 1);
    case ZT_PRE_QWEN2: return llama3(s, p, s->end, 1, 1);
    case ZT_PRE_SEED: return llama3(s, p, s->end, 1, 0);
    case ZT_PRE_QWEN35: return qwen35(s, p, s->end);
    case ZT_PRE_TEKKEN: return tekken(s, p, s->end, 1, 0);
    case ZT_PRE_O200K: return tekken(s, p, s->end, 3, 1);
    case ZT_PRE_DEEPSEEK3: return deepseek(s, p);
    case ZT_PRE_DEFAULT: return by_default(s, p);
    case ZT_PRE_KIMI: return kimi(s, p);
    case ZT_PRE_DEEPSEEK_LLM: return deepseek_llm(s, p);
    case ZT_PRE_SMOLLM: case ZT_PRE_MINICPM5: { /* digits apart, and what is between them is a text of its own */
        int is_smollm = s->pre == ZT_PRE_SMOLLM;
        if (at(s, p, s->end, &next) == NUMBER) return numbers(s, p, s->end, is_smollm ? 1 : 3);
        if (p >= s->piece_end) {
            for (s->piece_end = p; s->piece_end < s->end && at(s, s->piece_end, s->end, &next) != NUMBER;)
                s->piece_end = next;
        }
        return is_smollm ? gpt2(s, p, s->piece_end) : llama3(s, p, s->piece_end, 3, 1);
    }
    default: return s->end;
    }
}

/* The end of every piece, up to `capacity` of them; returns how many there are. */
int64_t zt_pretokenize(int64_t pre, const uint8_t *text, uint64_t bytes, int64_t *ends, uint64_t capacity)
{
    zt_scan scan;
    uint64_t count = 0;
    zt_scan_start(&scan, (int)pre, text, bytes);
    for (size_t p = 0; p < bytes; count++) {
        p = zt_scan_next(&scan, p);
        if (count < capacity) ends[count] = (int64_t)p;
    }
    return (int64_t)count;
}
