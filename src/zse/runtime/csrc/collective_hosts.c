/* What hosts send each other (collective.h): messages with tags over sockets that are connected already. */
#define _GNU_SOURCE
#include "collective_group.h"
#include "zse_runtime.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define TAG 8
#define LOOK_MS 20   /* a wait looks so often whether its ranks are alive and time is left */
#define IDLE_MS 250  /* a thread that has nothing to send looks so often whether it is to end */
#define DRAIN_MS 500
#define TRIES 100    /* of the sockets before a wait sleeps: a try is 0.3 to 1 us, a wake-up 5 to 50 */

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

#define ROTATED(x, bits) ((x) << (bits) | (x) >> (64 - (bits)))

static inline void sip_rounds(uint64_t v[4], int rounds) {
    while (rounds--) {
        v[0] += v[1], v[1] = ROTATED(v[1], 13) ^ v[0], v[0] = ROTATED(v[0], 32);
        v[2] += v[3], v[3] = ROTATED(v[3], 16) ^ v[2];
        v[0] += v[3], v[3] = ROTATED(v[3], 21) ^ v[0];
        v[2] += v[1], v[1] = ROTATED(v[1], 17) ^ v[2], v[2] = ROTATED(v[2], 32);
    }
}

static inline void sip_word(uint64_t v[4], uint64_t word) {
    v[3] ^= word;
    sip_rounds(v, 2);
    v[0] ^= word;
}

uint64_t zse_siphash(const uint64_t *key, const uint64_t *head, int32_t words, const uint8_t *data, int64_t bytes) {
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du, key[0] ^ 0x6c7967656e657261u,
                     key[1] ^ 0x7465646279746573u};
    uint64_t word, last = (uint64_t)(8 * words + bytes) << 56;
    for (int32_t i = 0; i < words; i++) sip_word(v, head[i]);
    for (; bytes >= 8; bytes -= 8, data += 8) {
        memcpy(&word, data, 8);
        sip_word(v, word);
    }
    for (int64_t i = 0; i < bytes; i++) last |= (uint64_t)data[i] << 8 * i;
    sip_word(v, last);
    v[2] ^= 0xff;
    sip_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static uint64_t tag_of(const zse_transfer *message) {
    const zse_link *link = message->link;
    uint64_t head[2] = {message->sends ? link->sent : link->received, (uint64_t)message->bytes};
    return zse_siphash(link->keys + (message->sends ? 0 : 2), head, 2, message->data, message->bytes);
}

/* As far as it goes without waiting. 1: it is over; 0: not yet; else why the link has, below 0: -ZSE_GROUP_*. */
static int32_t move(zse_transfer *message) {
    int64_t whole = message->bytes + TAG;
    if (message->sends && !message->begun) message->tag = tag_of(message);
    message->begun = true;
    while (message->done < whole) {
        int64_t of_data = message->done < message->bytes ? message->bytes - message->done : 0;
        int64_t of_tag = message->done > message->bytes ? message->done - message->bytes : 0;
        struct iovec parts[2] = {{message->data + message->done, (size_t)of_data}, {(uint8_t *)&message->tag + of_tag, (size_t)(TAG - of_tag)}};
        struct msghdr header = {.msg_iov = of_data ? parts : parts + 1, .msg_iovlen = of_data ? 2 : 1};
        ssize_t moved = message->sends ? sendmsg(message->link->fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL)
                                       : recvmsg(message->link->fd, &header, MSG_DONTWAIT);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
        if (moved <= 0) return -ZSE_GROUP_CLOSED;
        message->done += moved;
    }
    if (message->sends) {
        message->link->sent++;
        return 1;
    }
    if (message->tag != tag_of(message)) return -ZSE_GROUP_CHANGED;
    message->link->received++;
    return 1;
}

/* Whether to wait on for other hosts. A rank that has left may have done all it had to; who needs it notices. */
static bool look_at_host(zse_group *group) {
    for (int32_t rank = group->first; rank < group->first + group->per_node; rank++) {
        int32_t status = zse_group_why_ended(group, rank);
        if (status != ZSE_GROUP_OK && status != ZSE_GROUP_LEFT) zse_group_end(group, status, rank);
    }
    return is_running(group) && !atomic_load(&group->closing);
}

/* All messages; of one link and direction one after the other, in their order. False: the group has ended. */
static bool move_all(zse_group *group, zse_transfer *messages, int32_t count) {
    int64_t end_ms = 0;
    int32_t looks = 0;
    for (;;) {
        struct pollfd waits[2 * ZSE_MAX_RANKS];
        nfds_t waiting = 0;
        int32_t culprit = 0;
        bool moved = false;
        for (int32_t i = 0; i < count; i++) {
            zse_transfer *message = messages + i;
            bool stands_behind = false;
            for (int32_t j = 0; j < i; j++)
                stands_behind |= messages[j].link == message->link && messages[j].sends == message->sends && messages[j].done < messages[j].bytes + TAG;
            if (stands_behind || message->done == message->bytes + TAG) continue;
            int64_t before = message->done;
            int32_t state = move(message);
            if (state < 0) {
                zse_group_end(group, -state, message->rank);
                return false;
            }
            moved |= message->done != before;
            if (state) continue;
            culprit = message->rank;
            waits[waiting++] = (struct pollfd){message->link->fd, message->sends ? POLLOUT : POLLIN, 0};
        }
        if (moved) {
            end_ms = looks = 0;
            continue;
        }
        if (!waiting) return true;
        if (looks++ < TRIES && group->spins > TRIES) continue;
        if (!end_ms) end_ms = zse_now_ms() + group->timeout_ms;
        if (!look_at_host(group)) return false;
        if (zse_now_ms() >= end_ms) {
            zse_group_end(group, ZSE_GROUP_TIMEOUT, culprit);
            return false;
        }
        poll(waits, waiting, LOOK_MS);
    }
}

static zse_transfer message_of(zse_group *group, int32_t kind, int32_t node, bool sends, uint8_t *data, int64_t bytes) {
    zse_transfer message = {&group->links[kind][node], sends, false, node * group->per_node, data, bytes, 0, 0};
    return message;
}

/* Whether this call is the one that exchanges: the leader's first block, when all of the host have arrived. */
static bool exchanges(zse_group *group, int64_t first) { return leads(group) && !first && zse_group_wait_for_all(group); }

static void after_exchange(zse_group *group, const int64_t *grid, int64_t first, int64_t last) {
    if (is_running(group) && zse_group_is_last(group, grid, first, last)) zse_group_arrive(group);
}

void zse_group_reduce_exchange(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t bytes = (int64_t)args[3] * zse_group_item_bytes((int64_t)args[4]);
    if (is_running(group) && exchanges(group, first)) {
        zse_transfer messages[2 * ZSE_MAX_RANKS];
        int32_t count = 0;
        for (int32_t node = 0; node < group->nodes; node++) {
            if (node == group->node) continue;
            messages[count++] = message_of(group, ZSE_LINK_SUMS, node, true, result_of(group, group->node), bytes);
            messages[count++] = message_of(group, ZSE_LINK_SUMS, node, false, result_of(group, node), bytes);
        }
        move_all(group, messages, count);
    }
    after_exchange(group, grid, first, last);
}

void zse_group_gather_exchange(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    const int64_t *widths = (const int64_t *)(uintptr_t)args[4];
    if (is_running(group) && exchanges(group, first)) {
        zse_transfer messages[ZSE_MAX_RANKS];
        int32_t count = 0;
        for (int32_t rank = group->per_node; rank < group->size; rank++) {
            int32_t node = rank / group->per_node;
            if (group->node && node != group->node) continue;
            messages[count++] = message_of(group, ZSE_LINK_SUMS, group->node ? 0 : node, group->node, large_slot(group, rank),
                                           (int64_t)args[3] * widths[rank]);
        }
        move_all(group, messages, count);
    }
    after_exchange(group, grid, first, last);
}

void zse_group_broadcast_exchange(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    if (is_running(group) && exchanges(group, first)) {
        zse_transfer messages[ZSE_MAX_RANKS];
        int32_t count = 0;
        for (int32_t node = group->node ? 0 : 1; node < (group->node ? 1 : group->nodes); node++)
            messages[count++] = message_of(group, ZSE_LINK_SUMS, node, !group->node, large_slot(group, 0), (int64_t)args[2]);
        move_all(group, messages, count);
    }
    after_exchange(group, grid, first, last);
}

/* The ring between hosts. */

void zse_group_receive_far(zse_group *group, const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    int32_t before = (group->node + group->nodes - 1) % group->nodes;
    if (!is_running(group)) return;
    if (!first) {
        zse_transfer message = message_of(group, ZSE_LINK_STREAM, before, false, (uint8_t *)(uintptr_t)args[1], (int64_t)args[2]);
        if (!move_all(group, &message, 1)) return;
    }
    if (zse_group_is_last(group, grid, first, last)) group->receives++;
}

static void *pump_main(void *argument) {
    zse_group *group = argument;
    int32_t rank = group->first + group->per_node - 1, node = (group->node + 1) % group->nodes;
    struct rank_state *from = &group->header->ranks[rank], *to = &group->header->ranks[(rank + 1) % group->size];
    for (uint32_t number = 0; is_running(group) && !atomic_load(&group->closing);) {
        uint32_t sent = atomic_load(&from->sent);
        if (sent == number) {
            zse_group_sleep_on(group, &from->sent, sent, IDLE_MS);
            continue;
        }
        zse_transfer message = message_of(group, ZSE_LINK_STREAM, node, true, sent_slot(group, rank, number), from->sent_bytes[number & 1]);
        if (!move_all(group, &message, 1)) break;
        zse_group_wake_at(group, &to->received, ++number);
    }
    return NULL;
}

int32_t zse_group_link(zse_group *group, int32_t kind, int32_t node, int32_t fd, const uint64_t *keys) {
    if (!leads(group) || kind < 0 || kind > 1 || node < 0 || node >= group->nodes || node == group->node || fd < 0) return -1;
    zse_link *link = &group->links[kind][node];
    link->fd = fd;
    memcpy(link->keys, keys, sizeof link->keys);
    if (kind == ZSE_LINK_STREAM && node == (group->node + 1) % group->nodes && !group->has_pump) {
        if (pthread_create(&group->pump, NULL, pump_main, group)) return -1;
        group->has_pump = true;
    }
    return 0;
}

void zse_group_stop_pump(zse_group *group) {
    int32_t rank = group->first + group->per_node - 1;
    _Atomic uint32_t *sent = &group->header->ranks[rank].sent, *passed = &group->header->ranks[(rank + 1) % group->size].received;
    if (!group->has_pump) return;
    /* What was sent last may still be on its way. */
    for (int looks = 0; looks < DRAIN_MS && is_running(group) && atomic_load(sent) != atomic_load(passed); looks++) poll(NULL, 0, 1);
    atomic_store(&group->closing, true);
    zse_group_wake_at(group, sent, atomic_load(sent));
    pthread_join(group->pump, NULL);
}
