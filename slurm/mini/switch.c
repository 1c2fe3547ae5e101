/* An Ethernet switch with a rate and a delay per port, for kernels without netem.
 *
 *   switch PIPE    takes orders from the pipe, one a line:
 *     add NAME NET            makes the port NAME, or makes it again; ports of one NET see each other
 *     shape NAME RATE DELAY   bits per second, both ways (0: no limit); nanoseconds, one way
 *     block NAME 0|1          1: what goes to the port or comes from it vanishes
 *
 * A port is a tap device, which the caller moves into a node. Frames keep their virtio header, so that 64 KB of TCP
 * pass in one read and one write, and a gigabit costs little CPU. A frame passes the sender's link, the delay and the
 * receiver's link, each first in, first out; the delay between two ports is the mean of theirs. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define PORTS 256
#define FRAME 70000
#define SECOND 1000000000LL
#define BACKLOG 1000000LL /* ns of unsent frames from which a port is not read: its node's own queue fills */
#define TAIL 100000000LL  /* ns of frames waiting for a link from which more are dropped */

typedef struct frame {
    struct frame *next;
    int64_t due;
    int length;
    unsigned char bytes[];
} Frame;

typedef struct {
    char name[IFNAMSIZ];
    int fd, net, blocked, known;
    unsigned char mac[6];
    double byte_time; /* ns on the link */
    int64_t delay, sent, received; /* when the link is free again, from and to the node */
    Frame *head, *tail;
} Port;

static Port ports[PORTS];
static int count;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

static Port *find(const char *name) {
    for (int i = 0; i < count; i++)
        if (!strcmp(ports[i].name, name)) return &ports[i];
    return NULL;
}

static void close_port(Port *port) {
    if (port->fd >= 0) close(port->fd);
    port->fd = -1;
}

static void add(const char *name, int net) {
    Port *port = find(name);
    if (!port) {
        if (count == PORTS) return;
        port = &ports[count++];
        snprintf(port->name, IFNAMSIZ, "%s", name);
    } else {
        close_port(port);
    }
    port->net = net;
    port->known = port->blocked = 0;
    port->fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int header = sizeof(struct virtio_net_hdr);
    snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
    if (port->fd < 0 || ioctl(port->fd, TUNSETIFF, &request) || ioctl(port->fd, TUNSETVNETHDRSZ, &header) ||
        ioctl(port->fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) {
        perror(name);
        close_port(port);
    }
}

/* Queues a frame, which the sender began to send at `began` and whose length on the wire is `wire`. */
static void queue(Port *from, Port *to, const unsigned char *bytes, int length, int wire, int64_t began, int64_t t) {
    if (to->fd < 0 || to->blocked) return;
    int64_t start = later(began + from->delay / 2 + to->delay / 2, to->received);
    if (start - t > TAIL + from->delay + to->delay) return;
    to->received = start + (int64_t)(wire * to->byte_time);
    Frame *frame = malloc(sizeof *frame + length);
    if (!frame) return;
    double slower = from->byte_time > to->byte_time ? from->byte_time : to->byte_time;
    *frame = (Frame){.due = start + (int64_t)(wire * slower), .length = length};
    memcpy(frame->bytes, bytes, length);
    if (to->tail) {
        frame->due = later(frame->due, to->tail->due);
        to->tail->next = frame;
    } else {
        to->head = frame;
    }
    to->tail = frame;
}

/* The length on the wire of what may be many segments: each has the headers, and preamble, gap and checksum. */
static int on_the_wire(const struct virtio_net_hdr *header, int length) {
    if (!header->gso_type || !header->gso_size) return length + 24;
    int headers = header->hdr_len ? header->hdr_len : 66;
    int segments = (length - headers + header->gso_size - 1) / header->gso_size;
    return length + (segments - 1) * headers + segments * 24;
}

static void forward(Port *from, const unsigned char *bytes, int length) {
    const struct virtio_net_hdr *header = (const void *)bytes;
    const unsigned char *to_mac = bytes + sizeof *header;
    int ethernet = length - (int)sizeof *header, wire = on_the_wire(header, ethernet);
    if (ethernet < 14 || from->blocked) return;
    int64_t t = now(), began = later(from->sent, t);
    memcpy(from->mac, to_mac + 6, 6);
    from->known = 1;
    from->sent = began + (int64_t)(wire * from->byte_time);
    for (int i = 0; i < count && !(to_mac[0] & 1); i++) {
        Port *to = &ports[i];
        if (to->known && to->net == from->net && !memcmp(to->mac, to_mac, 6)) {
            queue(from, to, bytes, length, wire, began, t);
            return;
        }
    }
    for (int i = 0; i < count; i++)
        if (&ports[i] != from && ports[i].net == from->net) queue(from, &ports[i], bytes, length, wire, began, t);
}

static void obey(const char *order) {
    char name[IFNAMSIZ] = "";
    double rate;
    long long delay;
    int number;
    if (sscanf(order, "add %15s %d", name, &number) == 2) {
        add(name, number);
    } else if (sscanf(order, "shape %15s %lf %lld", name, &rate, &delay) == 3 && find(name)) {
        find(name)->byte_time = rate > 0 ? 8.0 * SECOND / rate : 0;
        find(name)->delay = delay;
    } else if (sscanf(order, "block %15s %d", name, &number) == 2 && find(name)) {
        find(name)->blocked = number;
    }
}

static void read_orders(int pipe) {
    static char text[4096];
    static int filled;
    int got = read(pipe, text + filled, sizeof text - 1 - filled);
    if (got <= 0) return;
    text[filled += got] = 0;
    char *line = text, *end;
    for (; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        obey(line);
    }
    filled = strlen(line);
    memmove(text, line, filled + 1);
}

static void read_port(Port *port) {
    static unsigned char bytes[FRAME];
    for (int i = 0; i < 16 && port->sent - now() < BACKLOG; i++) {
        int got = read(port->fd, bytes, sizeof bytes);
        if (got > 0) {
            forward(port, bytes, got);
            continue;
        }
        /* EIO: the interface is down, as yet; anything else: it went with its node. */
        if (got < 0 && errno != EAGAIN && errno != EIO) close_port(port);
        return;
    }
}

static void deliver(Port *port, int64_t t) {
    while (port->head && port->head->due <= t) {
        Frame *frame = port->head;
        port->head = frame->next;
        if (!port->head) port->tail = NULL;
        if (port->fd >= 0 && write(port->fd, frame->bytes, frame->length) < 0 && errno == EBADFD) close_port(port);
        free(frame);
    }
}

/* Delivers what is due, and waits for orders, frames or the next that will be. */
static void turn(int pipe) {
    struct pollfd polled[PORTS + 1] = {{pipe, POLLIN, 0}};
    Port *whose[PORTS + 1];
    int n = 1;
    int64_t t = now(), next = INT64_MAX;
    for (int i = 0; i < count; i++) {
        Port *port = &ports[i];
        deliver(port, t);
        if (port->head && port->head->due < next) next = port->head->due;
        if (port->fd < 0) continue;
        if (port->sent - t < BACKLOG) {
            whose[n] = port;
            polled[n++] = (struct pollfd){port->fd, POLLIN, 0};
        } else if (port->sent - BACKLOG < next) {
            next = port->sent - BACKLOG;
        }
    }
    int64_t left = later(next - now(), 0);
    struct timespec until = {left / SECOND, left % SECOND};
    if (ppoll(polled, n, next == INT64_MAX ? NULL : &until, NULL) <= 0) return;
    for (int i = 1; i < n; i++)
        if (polled[i].revents) read_port(whose[i]);
    if (polled[0].revents & POLLIN) read_orders(pipe);
}

int main(int argc, char **argv) {
    struct sched_param first = {.sched_priority = 5};
    if (argc != 2) return 2;
    int pipe = open(argv[1], O_RDWR | O_NONBLOCK); /* never at its end, whoever closes it */
    if (pipe < 0) {
        perror(argv[1]);
        return 1;
    }
    sched_setscheduler(0, SCHED_RR, &first); /* its timing goes before the training processes */
    prctl(PR_SET_TIMERSLACK, 1);
    for (;;) turn(pipe);
}
