/* System calls as data, and the loop that forks cells and has each child execute them.
 *
 * A copied page costs 1.5 to 1.9 us, and whatever Python does after a fork copies hundreds
 * (measured).  So nothing here touches a Python object between the fork and the moment when the
 * child's program arrives; the launcher itself touches none between two cells.
 *
 * This file decides nothing.  steps.py lays a list out, enter.py says what is in it and why.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#if PY_VERSION_HEX >= 0x030D0000
/* From 3.13 on the headers name the plain function, whose `#` needs PY_SSIZE_T_CLEAN in 3.12 and older, where the
 * macro named this one instead.  The stable ABI keeps it, so what 3.13 builds works with all of them. */
PyAPI_FUNC(int) _PyArg_ParseTuple_SizeT(PyObject *, const char *, ...);
#define PyArg_ParseTuple _PyArg_ParseTuple_SizeT
#endif

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x00001000
#endif
#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef PR_GET_TID_ADDRESS
#define PR_GET_TID_ADDRESS 40
#endif
/* The same on every architecture (asm-generic/unistd.h); headers of Linux 5.10 lack some. */
enum {
    NR_PIDFD_SEND_SIGNAL = 424, NR_OPEN_TREE = 428, NR_MOVE_MOUNT = 429, NR_FSOPEN = 430,
    NR_FSCONFIG = 431, NR_FSMOUNT = 432, NR_PIDFD_OPEN = 434, NR_CLONE3 = 435,
    NR_CLOSE_RANGE = 436, NR_OPENAT2 = 437, NR_PIDFD_GETFD = 438, NR_PROCESS_MADVISE = 440,
    NR_MOUNT_SETATTR = 442,
    NR_LANDLOCK_CREATE_RULESET = 444,
    NR_LANDLOCK_ADD_RULE = 445, NR_LANDLOCK_RESTRICT_SELF = 446,
};

enum { CONTROL = 3 /* where a guest finds its control channel: enter.py */ };
enum { INPUTS = 16, INIT = 15, STREAMS = 5, MOST_AT_ONCE = 8, /* messages.py */ MOST_STEPS = 4096, MOST_DATA = 1 << 20, ARGUMENTS = 6, PACKET = 512 };
enum { MAGIC = 0x50455453, SETUP_FAILED = 70 /* EX_SOFTWARE; the status channel says what failed */ };

/* What an argument is, four bits each: itself, where it lies in the data, or what a step answered. */
enum { LITERAL, DATA, RESULT };
/* What a step does. */
enum { CALL, STORE, KEEP_ONLY, TELL, OWN_PAGES, MAP_IDS, OPERATIONS };
/* How a step may go wrong without ending the cell. */
enum { MAY_FAIL = 1, KNOWN_FLAGS = 1 };

struct step {
    uint16_t operation;
    uint16_t flags;
    uint32_t number;     /* of the system call */
    uint32_t kinds;      /* of the arguments */
    uint32_t words;      /* where in the data its description lies, NUL-terminated */
    int64_t arguments[ARGUMENTS];
};

struct header {
    uint32_t magic, steps, data, relocations;
    uint32_t status;     /* the number at which the status channel is to be found */
    uint32_t inputs;     /* how many descriptors a cell is given */
};

struct relocation {
    uint32_t where, target;  /* the 8 bytes of data there become the address of `target` */
};

struct program {
    uint32_t count, size, status, inputs;
    struct step *steps;
    char *data;
    int64_t *results;  /* INPUTS that the caller sets, then what each step answered */
    const char *pages; /* those to copy ahead, as pairs of address and length */
    size_t pages_length;
    size_t mapped;
};

/* reading a list: everything is checked before the first step */

static int argument_is_valid(const struct step *step, unsigned at, uint32_t index, uint32_t size)
{
    unsigned kind = step->kinds >> (4 * at) & 15;
    int64_t value = step->arguments[at];
    if (kind == DATA)
        return value >= 0 && value < size;
    if (kind == RESULT)
        return value >= 0 && value < INPUTS + (int64_t)index;
    return kind == LITERAL;
}

static int step_is_valid(const struct program *program, uint32_t index)
{
    const struct step *step = &program->steps[index];
    const char *data = program->data;
    if (step->operation >= OPERATIONS || step->flags & ~KNOWN_FLAGS || step->kinds >> 24)
        return 0;
    if (step->words >= program->size || !memchr(data + step->words, 0, program->size - step->words))
        return 0;
    for (unsigned at = 0; at < ARGUMENTS; at++)
        if (!argument_is_valid(step, at, index, program->size))
            return 0;
    unsigned first = step->kinds & 15;
    int64_t offset = step->arguments[0], length = step->arguments[1];
    if (step->operation == STORE)
        return first == DATA && offset + 4 <= program->size;
    if (step->operation == TELL)
        return first == DATA && (step->kinds >> 4 & 15) == LITERAL && length > 0
            && length <= PACKET && offset + length <= program->size;
    if (step->operation == MAP_IDS) /* two texts, which end within the data */
        return (step->kinds >> 4 & 15) == DATA && (step->kinds >> 8 & 15) == DATA
            && memchr(data + step->arguments[1], 0, program->size - step->arguments[1])
            && memchr(data + step->arguments[2], 0, program->size - step->arguments[2]);
    return 1;
}

static const char *load(struct program *program, const char *bytes, size_t length)
{
    struct header header;
    if (length < sizeof header)
        return "it is shorter than its header";
    memcpy(&header, bytes, sizeof header);
    if (header.magic != MAGIC || header.steps > MOST_STEPS || header.data > MOST_DATA
        || header.relocations > MOST_STEPS || header.inputs >= INIT)
        return "its header is invalid";
    size_t steps = header.steps * sizeof(struct step);
    size_t relocations = header.relocations * sizeof(struct relocation);
    if (length != sizeof header + steps + relocations + header.data)
        return "its length is not what its header says";
    size_t results = (INPUTS + header.steps) * sizeof(int64_t);
    program->mapped = steps + results + header.data + 1;
    char *memory = mmap(NULL, program->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return "there is no memory for it";
    program->pages_length = 0;
    program->count = header.steps;
    program->size = header.data;
    program->status = header.status;
    program->inputs = header.inputs;
    program->steps = (struct step *)memory;
    program->results = (int64_t *)(memory + steps);
    program->data = memory + steps + results;
    bytes += sizeof header;
    memcpy(program->steps, bytes, steps);
    memcpy(program->data, bytes + steps + relocations, header.data);
    for (uint32_t n = 0; n < header.relocations; n++) {
        struct relocation relocation;
        memcpy(&relocation, bytes + steps + n * sizeof relocation, sizeof relocation);
        if (relocation.target >= header.data || (uint64_t)relocation.where + 8 > header.data) {
            munmap(memory, program->mapped);
            return "a pointer in its data leads outside";
        }
        uint64_t address = (uint64_t)(uintptr_t)(program->data + relocation.target);
        memcpy(program->data + relocation.where, &address, sizeof address);
    }
    for (uint32_t n = 0; n < header.steps; n++)
        if (!step_is_valid(program, n)) {
            munmap(memory, program->mapped);
            return "a step is invalid";
        }
    return NULL;
}

/* executing it */

static int send_packet(int sock, const void *packet, size_t length, const int *descriptors, size_t count)
{
    union {
        char bytes[CMSG_SPACE(INPUTS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part = {(void *)packet, length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(rights), descriptors, count * sizeof(int));
    }
    return sendmsg(sock, &message, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

static size_t put_integer(unsigned char *at, int64_t value)
{
    at[0] = 0xd3; /* msgpack: int 64 */
    for (int n = 0; n < 8; n++)
        at[1 + n] = (uint64_t)value >> (56 - 8 * n) & 0xff;
    return 9;
}

static size_t put_double(unsigned char *at, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_integer(at, (int64_t)bits);
    at[0] = 0xcb; /* msgpack: float 64 */
    return 9;
}

/* Send a Failed frame (messages.py) of what failed and the kernel's answer. */
static void tell_failure(int status, int number, const char *words)
{
    unsigned char packet[PACKET] = "\0\x93\xa6" "Failed";
    size_t length = 9, size = strnlen(words, 200);
    length += put_integer(packet + length, number);
    packet[length++] = 0xd9; /* msgpack: str 8 */
    packet[length++] = (unsigned char)size;
    memcpy(packet + length, words, size);
    (void)send_packet(status, packet, length + size, NULL, 0);
}

static int close_between(int64_t first, int64_t last)
{
    return first > last ? 0 : (int)syscall(NR_CLOSE_RANGE, first, last, 0);
}

/* Close every descriptor but 0 to 3 and those in `keep`, by number: /proc/self/fd can lie. */
static int keep_only(int64_t *keep, unsigned count)
{
    for (unsigned n = 1; n < count; n++)
        for (unsigned m = n; m > 0 && keep[m - 1] > keep[m]; m--) {
            int64_t larger = keep[m - 1];
            keep[m - 1] = keep[m];
            keep[m] = larger;
        }
    int64_t first = 4;
    for (unsigned n = 0; n < count; n++) {
        if (keep[n] < first || keep[n] > INT32_MAX)
            continue;
        if (close_between(first, keep[n] - 1))
            return -1;
        first = keep[n] + 1;
    }
    return close_between(first, INT32_MAX);
}

static pid_t clone_process(uint64_t flags, int cgroup, void *thread_id, int *pidfd);

static int write_map(int proc, const char *process, const char *name, const char *map)
{
    char path[64];
    size_t length = strlen(process);
    memcpy(path, process, length);
    memcpy(path + length, name, strlen(name) + 1);
    int file = openat(proc, path, O_WRONLY | O_CLOEXEC);
    if (file < 0)
        return errno;
    int refused = write(file, map, strlen(map)) < 0 ? errno : 0; /* a second write is refused always */
    close(file);
    return refused;
}

/* Move into a new user namespace that has several ids.  Only a process outside may map them
 * (user_namespaces(7)): a child that is made before, and ends. */
static int enter_mapped(int proc, const char *uids, const char *gids)
{
    char itself[24];
    ssize_t length = readlinkat(proc, "self", itself, sizeof itself - 1);
    int ends[2], pidfd = -1, status = 0;
    if (length < 0 || pipe2(ends, O_CLOEXEC))
        return -1;
    itself[length] = 0;
    pid_t pid = clone_process(0, -1, NULL, &pidfd);
    if (pid == 0) {
        char byte;
        close(ends[1]);
        if (read(ends[0], &byte, 1) != 1)
            _exit(ECANCELED);
        int refused = write_map(proc, itself, "/uid_map", uids);
        _exit(refused ? refused : write_map(proc, itself, "/gid_map", gids));
    }
    int refused = pid < 0 || unshare(CLONE_NEWUSER) || write(ends[1], "", 1) != 1 ? errno : 0;
    close(ends[0]);
    close(ends[1]);
    if (pid > 0) {
        while (waitpid(pid, &status, __WALL) < 0 && errno == EINTR)
            ;
        close(pidfd);
        if (!refused)
            refused = WIFEXITED(status) ? WEXITSTATUS(status) : ECHILD;
    }
    errno = refused;
    return refused ? -1 : 0;
}

/* Copy the pages that a rehearsal has written.  It saves time, and nothing depends on it.  Linux 6.14 takes
 * this advice for all ranges at once; each is laid out as a struct iovec. */
static void copy_pages(const struct program *program)
{
    enum { MOST = 1024 /* UIO_MAXIOV */, ITSELF = -10000 /* PIDFD_SELF_THREAD */ };
    const struct iovec *ranges = (const struct iovec *)program->pages;
    size_t count = program->pages_length / sizeof *ranges;
    for (size_t at = 0, whole, last; at < count; at = last) {
        whole = 0;
        for (last = at; last < count && last - at < MOST; last++)
            whole += ranges[last].iov_len;
        if (syscall(NR_PROCESS_MADVISE, ITSELF, ranges + at, last - at, MADV_POPULATE_WRITE, 0) == (long)whole)
            continue;
        for (size_t n = at; n < last; n++)
            (void)madvise(ranges[n].iov_base, ranges[n].iov_len, MADV_POPULATE_WRITE);
    }
}

static long execute_step(struct program *program, const struct step *step)
{
    int64_t value[ARGUMENTS];
    for (unsigned at = 0; at < ARGUMENTS; at++) {
        value[at] = step->arguments[at];
        switch (step->kinds >> (4 * at) & 15) {
        case DATA:
            value[at] = (int64_t)(uintptr_t)(program->data + value[at]);
            break;
        case RESULT:
            value[at] = program->results[value[at]];
            break;
        }
    }
    switch (step->operation) {
    case STORE: {
        int32_t stored = (int32_t)value[1];
        memcpy((char *)(uintptr_t)value[0], &stored, sizeof stored);
        return 0;
    }
    case KEEP_ONLY: {
        int64_t keep[ARGUMENTS + 1 + INPUTS - STREAMS];
        memcpy(keep, value, sizeof value);
        keep[ARGUMENTS] = program->status;
        memcpy(keep + ARGUMENTS + 1, program->results + STREAMS, (INPUTS - STREAMS) * sizeof *keep);
        return keep_only(keep, sizeof keep / sizeof *keep);
    }
    case OWN_PAGES:
        copy_pages(program);
        return 0;
    case MAP_IDS:
        return enter_mapped((int)value[0], (char *)(uintptr_t)value[1], (char *)(uintptr_t)value[2]);
    case TELL: {
        int descriptors[ARGUMENTS];
        size_t count = 0;
        for (unsigned at = 2; at < ARGUMENTS; at++)
            if ((step->kinds >> (4 * at) & 15) == RESULT)
                descriptors[count++] = (int)value[at];
        return send_packet(
            (int)program->status, (void *)(uintptr_t)value[0], (size_t)value[1], descriptors, count);
    }
    default:
        return syscall(step->number, value[0], value[1], value[2], value[3], value[4], value[5]);
    }
}

/* Execute every step; return the index of the first that the kernel refused, with errno, or -1. */
static int64_t execute(struct program *program)
{
    for (uint32_t n = 0; n < program->count; n++) {
        const struct step *step = &program->steps[n];
        long answer = execute_step(program, step);
        if (answer == -1 && !(step->flags & MAY_FAIL))
            return n;
        program->results[INPUTS + n] = answer;
    }
    return -1;
}

/* the launcher's loop */

struct cell {
    pid_t pid;
    int pidfd, init, status;
    int network;         /* its network namespace, -1 where no sockets are made in it */
};

struct launcher {
    int sock, nursery, keeper, events;
    int ahead;           /* how many inits the nursery is to have ready beyond the next */
    int home[3];         /* the launcher's own net, ipc and uts namespaces */
    int opens_sockets;   /* in the network namespaces of its cells, when it is asked to */
    void *thread_id;
    struct program program;
    struct cell *cells;
    size_t room;
};

struct received {
    unsigned char packet[PACKET];
    ssize_t length;
    int descriptors[MOST_AT_ONCE * INPUTS];
    int count;
};

static void close_all(const int *descriptors, int count)
{
    for (int n = 0; n < count; n++)
        close(descriptors[n]);
}

/* Receive one packet and its descriptors; -1 with errno, or EPROTO for one that was cut. */
static int receive(int sock, struct received *into)
{
    union {
        char bytes[CMSG_SPACE(sizeof into->descriptors)];
        struct cmsghdr align;
    } control;
    struct iovec part = {into->packet, sizeof into->packet};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control,
    };
    do
        into->length = recvmsg(sock, &message, MSG_CMSG_CLOEXEC);
    while (into->length < 0 && errno == EINTR);
    into->count = 0;
    if (into->length < 0)
        return -1;
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each))
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS) {
            into->count = (int)((each->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(into->descriptors, CMSG_DATA(each), (size_t)into->count * sizeof(int));
        }
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        close_all(into->descriptors, into->count);
        into->count = 0;
        errno = EPROTO;
        return -1;
    }
    return 0;
}

enum { NETWORK = 2 /* of the descriptors of an init */, NAMESPACES = 4, MOST_TRIES = 3 };

static int is_alive(int pidfd)
{
    struct pollfd poll_one = {pidfd, POLLIN, 0};
    return poll(&poll_one, 1, 0) == 0;
}

enum { IN_LAUNCHER, IN_GUEST, AT_END };
enum { TAKEN, REFUSED, NURSERY_GONE };

/* A nursery that dies closes its socket a moment before the kernel kills the launcher (do_exit), with a
 * reset if it left something unread.  It is no failure of a cell: the launcher is lost. */
static int has_hung_up(int number)
{
    return number == EPIPE || number == ECONNRESET;
}

/* Take the next init from the nursery: a pidfd and its pid, net, ipc and uts namespaces.  Pass over one that
 * was killed while it waited.  When none can be had tell `status`, in the nursery's own words where there are
 * some. */
static int take_init(struct launcher *launcher, int status, struct received *init)
{
    for (int tries = 0; tries < MOST_TRIES; tries++) {
        size_t wanted = (size_t)(1 + launcher->ahead);
        launcher->ahead = 0; /* from now on as many are made as are taken */
        if (send(launcher->nursery, "+++++++", wanted, MSG_NOSIGNAL) < 0 || receive(launcher->nursery, init)) {
            if (has_hung_up(errno))
                return NURSERY_GONE;
            tell_failure(status, errno, "asking the nursery for an init");
            return REFUSED;
        }
        if (init->count == 1 + NAMESPACES && is_alive(init->descriptors[0]))
            return TAKEN;
        if (init->count)
            (void)syscall(NR_PIDFD_SEND_SIGNAL, init->descriptors[0], SIGKILL, NULL, 0);
        close_all(init->descriptors, init->count);
        if (init->length == 0)
            return NURSERY_GONE;
        if (init->count == 0)
            break;
    }
    if (init->count == 1 + NAMESPACES)
        tell_failure(status, ESRCH, "clone of a cell's init");
    else
        (void)send_packet(status, init->packet, (size_t)init->length, NULL, 0);
    return REFUSED;
}

/* Where the C library keeps the thread's id, which clone3 has to set; NULL without CONFIG_CHECKPOINT_RESTORE. */
static void *find_thread_id(void)
{
    void *found = NULL;
    (void)prctl(PR_GET_TID_ADDRESS, &found);
    return found;
}

/* Fork into new namespaces, and with `cgroup` >= 0 into that v2 cgroup: attaching the child later, by a
 * write, costs ten times as much (measured). */
static pid_t clone_process(uint64_t flags, int cgroup, void *thread_id, int *pidfd)
{
    uint64_t arguments[11] = {0};
    arguments[0] = flags | CLONE_PIDFD;
    arguments[1] = (uint64_t)(uintptr_t)pidfd;
    if (thread_id) {
        arguments[0] |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID;
        arguments[2] = (uint64_t)(uintptr_t)thread_id;
    }
    arguments[4] = SIGCHLD;
    if (cgroup >= 0) {
        arguments[0] |= CLONE_INTO_CGROUP;
        arguments[10] = (uint64_t)cgroup;
    }
    return (pid_t)syscall(NR_CLONE3, arguments, sizeof arguments);
}

/* In the child: execute the list and wait for the program; returns once there is one, or the end. */
static void become_guest(struct launcher *launcher, const int *given, int count, int init)
{
    struct program *program = &launcher->program;
    int64_t *inputs = program->results;
    int number = (int)program->status;
    for (int n = 0; n < INPUTS; n++)
        inputs[n] = n < count ? given[n] : -1;
    inputs[INIT] = init;
    /* Where many cells live, one of our own descriptors may have the number that status is to have. */
    for (int n = 1; n < INPUTS; n++)
        if (inputs[n] == number)
            inputs[n] = dup(number);
    if (inputs[0] != number && dup3((int)inputs[0], number, O_CLOEXEC) < 0)
        _exit(SETUP_FAILED);
    int64_t failed = execute(program);
    if (failed >= 0) {
        tell_failure(number, errno, program->data + program->steps[failed].words);
        _exit(SETUP_FAILED);
    }
    char byte;
    while (recv(CONTROL, &byte, 1, MSG_PEEK) < 0 && errno == EINTR)
        ;
}

/* Go home: what is in a cell's namespaces must not outlive the cell.  Without that the launcher ends. */
static int leave(struct launcher *launcher)
{
    for (int n = 0; n < 3; n++)
        if (setns(launcher->home[n], 0))
            return -1;
    return 0;
}

static void kill_and_close(int pidfd)
{
    (void)syscall(NR_PIDFD_SEND_SIGNAL, pidfd, SIGKILL, NULL, 0);
    close(pidfd);
}

/* A forked child has no copy of the table, which says what other cells there are. */
static int keep_to_ourselves(struct cell *cells, size_t room)
{
    return madvise(cells, room * sizeof *cells, MADV_DONTFORK);
}

static int remember(struct launcher *launcher, struct cell cell)
{
    size_t at = 0;
    while (at < launcher->room && launcher->cells[at].pid)
        at++;
    if (at == launcher->room) {
        size_t room = launcher->room ? 2 * launcher->room : 64;
        struct cell *cells = mremap(
            launcher->cells, launcher->room * sizeof cell, room * sizeof cell, MREMAP_MAYMOVE);
        if (cells == MAP_FAILED)
            return -1;
        launcher->cells = cells;
        launcher->room = room;
        if (keep_to_ourselves(cells, room))
            return -1;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 2 + at};
    if (epoll_ctl(launcher->events, EPOLL_CTL_ADD, cell.pidfd, &event))
        return -1;
    launcher->cells[at] = cell;
    return 0;
}

/* Make one cell of what it is given. */
static int fork_one(struct launcher *launcher, const int *given, int count, int into_cgroup)
{
    struct received init;
    int cgroup = into_cgroup ? given[--count] : -1;
    int status = given[0];
    int outcome = IN_LAUNCHER;
    struct cell cell = {0, -1, -1, status, -1};
    int taken = take_init(launcher, status, &init);
    if (taken != TAKEN) {
        close_all(given, count);
        if (cgroup >= 0)
            close(cgroup);
        return taken == NURSERY_GONE ? AT_END : IN_LAUNCHER;
    }
    cell.init = init.descriptors[0];
    int refused = 0;
    for (int n = 1; n <= NAMESPACES && !refused; n++)
        refused = setns(init.descriptors[n], 0);
    if (refused)
        tell_failure(status, errno, "setns into a cell's namespaces");
    else if (!(cell.pid = clone_process(CLONE_NEWNS, cgroup, launcher->thread_id, &cell.pidfd))) {
        become_guest(launcher, given, count, cell.init);
        return IN_GUEST;
    } else if ((refused = cell.pid < 0))
        tell_failure(status, errno, "clone3 of a guest");
    if (leave(launcher))
        outcome = AT_END;
    if (launcher->opens_sockets) {
        cell.network = init.descriptors[NETWORK];
        init.descriptors[NETWORK] = -1;
    }
    close_all(init.descriptors + 1, NAMESPACES);
    close_all(given + 1, count - 1);
    if (cgroup >= 0)
        close(cgroup);
    if (!refused && remember(launcher, cell)) { /* no memory: nobody would reap it */
        tell_failure(status, errno, "watching a guest");
        (void)syscall(NR_PIDFD_SEND_SIGNAL, cell.pidfd, SIGKILL, NULL, 0);
        (void)waitpid(cell.pid, NULL, 0);
        close(cell.pidfd);
        refused = 1;
    }
    if (refused) {
        kill_and_close(cell.init);
        close(cell.network);
        close(status);
    }
    return outcome;
}

static double seconds(struct timeval time)
{
    return (double)time.tv_sec + (double)time.tv_usec / 1e6;
}

/* The guest's main process has ended, and with it the cell: send an Ended frame (messages.py). */
static void bury(struct launcher *launcher, size_t at)
{
    struct cell cell = launcher->cells[at];
    int wait_status = 0;
    struct rusage usage = {0};
    launcher->cells[at].pid = 0;
    (void)epoll_ctl(launcher->events, EPOLL_CTL_DEL, cell.pidfd, NULL);
    kill_and_close(cell.init); /* first: a guest that traces it would keep its end from us (ptrace(2)) */
    (void)wait4(cell.pid, &wait_status, 0, &usage);
    close(cell.pidfd);
    close(cell.network);
    unsigned char packet[64] = "\0\x95\xa5" "Ended";
    size_t length = 8;
    length += put_integer(packet + length, wait_status);
    length += put_double(packet + length, seconds(usage.ru_utime));
    length += put_double(packet + length, seconds(usage.ru_stime));
    length += put_integer(packet + length, (int64_t)usage.ru_maxrss * 1024);
    (void)send_packet(cell.status, packet, length, NULL, 0);
    close(cell.status);
}

/* An OpenSocket frame: its tag, and the number of a guest in the launcher's pid namespace as 4 bytes. */
static const unsigned char OPEN_SOCKET[] = "\0\x92\xaa" "OpenSocket" "\xc4\x04";
static const unsigned char SOCKET_MADE[] = "\0\x91\xaa" "SocketMade";
enum { OPEN_SOCKET_LENGTH = sizeof OPEN_SOCKET - 1, SOCKET_MADE_LENGTH = sizeof SOCKET_MADE - 1 };

static int is_open_socket(const struct received *frame)
{
    return frame->length == OPEN_SOCKET_LENGTH + (ssize_t)sizeof(int32_t) && frame->count == 2
        && !memcmp(frame->packet, OPEN_SOCKET, OPEN_SOCKET_LENGTH);
}

/* The cell of a guest; NULL if it has ended.  Only this process reaps guests, so while the pidfd says that
 * the guest lives, no other process has its number. */
static const struct cell *find_cell(const struct launcher *launcher, int32_t pid, int guest)
{
    for (size_t at = 0; pid > 0 && at < launcher->room; at++)
        if (launcher->cells[at].pid == pid)
            return is_alive(guest) ? &launcher->cells[at] : NULL;
    return NULL;
}

/* Make a TCP socket in the network namespace of a cell and send it on the socket that came with the frame: a
 * socket stays in the namespace in which it was made (network_namespaces(7)).  One of IPv6 reaches servers of
 * both versions (ipv6(7)). */
static int open_socket(struct launcher *launcher, const struct received *asked)
{
    int32_t pid;
    int guest = asked->descriptors[0], answer = asked->descriptors[1], made = -1, outcome = IN_LAUNCHER;
    memcpy(&pid, asked->packet + OPEN_SOCKET_LENGTH, sizeof pid);
    const struct cell *cell = find_cell(launcher, pid, guest);
    if (!cell || cell->network < 0)
        tell_failure(answer, ESRCH, "finding the cell of a socket");
    else if (setns(cell->network, CLONE_NEWNET))
        tell_failure(answer, errno, "setns into the network namespace of a cell");
    else {
        made = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (made < 0 && errno == EAFNOSUPPORT)
            made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (made < 0)
            tell_failure(answer, errno, "socket in the network namespace of a cell");
        if (setns(launcher->home[0], CLONE_NEWNET))
            outcome = AT_END; /* as in `leave` */
    }
    if (made >= 0) {
        (void)send_packet(answer, SOCKET_MADE, SOCKET_MADE_LENGTH, &made, 1);
        close(made);
    }
    close_all(asked->descriptors, asked->count);
    return outcome;
}

/* A Fork frame is array_like msgpack: its tag, one boolean and a number up to MOST_AT_ONCE (messages.py). */
static const unsigned char FORK[] = "\0\x93\xa4" "Fork";
enum { FORK_LENGTH = sizeof FORK - 1 };

static int serve_one(struct launcher *launcher)
{
    struct received fork;
    if (receive(launcher->sock, &fork) || fork.length == 0)
        return AT_END;
    if (is_open_socket(&fork))
        return open_socket(launcher, &fork);
    int into_cgroup = fork.packet[FORK_LENGTH] == 0xc3, cells = fork.packet[FORK_LENGTH + 1];
    int each = (int)launcher->program.inputs + into_cgroup; /* at most INPUTS */
    if (fork.length != FORK_LENGTH + 2 || memcmp(fork.packet, FORK, FORK_LENGTH)
        || (fork.packet[FORK_LENGTH] & 0xfe) != 0xc2 || cells < 1 || cells > MOST_AT_ONCE
        || fork.count != cells * each) {
        close_all(fork.descriptors, fork.count);
        return AT_END; /* our own supervisor sends no such thing: fail closed */
    }
    for (int n = 0; n < cells; n++) {
        int outcome = fork_one(launcher, fork.descriptors + n * each, each, into_cgroup);
        if (outcome == AT_END)
            close_all(fork.descriptors + (n + 1) * each, (cells - n - 1) * each);
        if (outcome != IN_LAUNCHER)
            return outcome; /* a guest has closed what is left */
    }
    return IN_LAUNCHER;
}

static int serve(struct launcher *launcher)
{
    struct epoll_event events[32];
    struct epoll_event sock = {.events = EPOLLIN, .data.u64 = 0};
    struct epoll_event keeper = {.events = EPOLLIN, .data.u64 = 1};
    launcher->events = epoll_create1(EPOLL_CLOEXEC);
    if (launcher->events < 0 || epoll_ctl(launcher->events, EPOLL_CTL_ADD, launcher->sock, &sock)
        || epoll_ctl(launcher->events, EPOLL_CTL_ADD, launcher->keeper, &keeper))
        return AT_END;
    for (;;) {
        int count = epoll_wait(launcher->events, events, 32, -1);
        if (count < 0 && errno != EINTR)
            return AT_END;
        for (int n = 0; n < count; n++) {
            uint64_t which = events[n].data.u64;
            if (which == 1)
                return AT_END;
            int outcome = IN_LAUNCHER;
            if (which == 0)
                outcome = serve_one(launcher);
            else
                bury(launcher, (size_t)which - 2);
            if (outcome != IN_LAUNCHER)
                return outcome;
        }
    }
}

/* the rehearsal: which pages does a child use that does what any program has a guest do? */

enum { MOST_RANGES = 4096 };

struct rehearsal {
    PyObject *work;
    int near, far;         /* the child's control channel, and its other end */
    const char *regions;   /* where to look, pairs of start and end */
    Py_ssize_t length;
    int of_files;          /* for pages of files that are there, not for those that were written */
};

struct found {
    uint64_t count;
    uint64_t ranges[MOST_RANGES][2];
};

static void add_page(struct found *found, uint64_t start, uint64_t size)
{
    uint64_t *last = found->count ? found->ranges[found->count - 1] : NULL;
    if (last && last[0] + last[1] == start)
        last[1] += size;
    else if (found->count < MOST_RANGES) {
        found->ranges[found->count][0] = start;
        found->ranges[found->count++][1] = size;
    }
}

/* By what proc_pid_pagemap(5) says of it: a page that was written is no file's, and no other process has it. */
static int is_wanted(uint64_t word, int of_files)
{
    int is_here = word >> 63 & 1, is_of_file = word >> 61 & 1, is_ours_alone = word >> 56 & 1;
    return is_here && (of_files ? is_of_file : !is_of_file && is_ours_alone);
}

static void find_pages(const struct rehearsal *rehearsal, struct found *found)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    (void)prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* or /proc/self is not this process's to read */
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    for (Py_ssize_t at = 0; pagemap >= 0 && at + 16 <= rehearsal->length; at += 16) {
        uint64_t region[2], words[128];
        memcpy(region, rehearsal->regions + at, sizeof region);
        for (uint64_t start = region[0]; start < region[1]; start += 128 * page) {
            ssize_t size = pread(pagemap, words, sizeof words, (off_t)(start / page * 8));
            for (uint64_t n = 0; size > 0 && n < (uint64_t)size / 8 && start + n * page < region[1]; n++)
                if (is_wanted(words[n], rehearsal->of_files))
                    add_page(found, start + n * page, page);
        }
    }
}

/* A page that either of the two writes is from then on each one's own: so the parent waits.  In C, because
 * Python that looks for pages writes a hundred of its own. */
static struct found *rehearse(const struct rehearsal *rehearsal)
{
    int pidfd = -1;
    struct found *found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pid = found == MAP_FAILED ? -1 : clone_process(0, -1, find_thread_id(), &pidfd);
    if (!pid) {
        if (dup2(rehearsal->near, CONTROL) == CONTROL && PyObject_CallNoArgs(rehearsal->work))
            find_pages(rehearsal, found);
        _exit(0);
    }
    close(rehearsal->near);
    close(rehearsal->far);
    if (pid < 0) {
        if (found != MAP_FAILED)
            munmap(found, sizeof *found);
        return NULL;
    }
    close(pidfd);
    while (waitpid(pid, NULL, 0) < 0)
        if (errno != EINTR) {
            munmap(found, sizeof *found);
            return NULL;
        }
    return found;
}

/* Note in the program what a rehearsal found, in memory that no two processes share. */
static int rehearse_for(struct program *program, const struct rehearsal *rehearsal)
{
    struct found *found = rehearse(rehearsal);
    if (!found)
        return -1;
    size_t length = found->count * sizeof *found->ranges;
    char *kept = mmap(NULL, length + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (kept != MAP_FAILED) {
        memcpy(kept, found->ranges, length);
        program->pages = kept;
        program->pages_length = length;
    }
    munmap(found, sizeof *found);
    return kept == MAP_FAILED ? -1 : 0;
}

/* the module */

static PyObject *refuse(const char *why)
{
    PyErr_Format(PyExc_ValueError, "a list of steps cannot be loaded: %s", why);
    return NULL;
}

PyDoc_STRVAR(serve_doc,
"serve(program, sock, nursery, keeper, home, hooks, opens_sockets, booted, rehearsal) -> None\n\n"
"Rehearse, send `booted` on `sock`, and fork a cell for each Fork frame on `sock`, and with `opens_sockets` make a socket in a cell's network\n"
"namespace for each OpenSocket frame.  `rehearsal` is what `rehearse` takes, or has the control channel -1\n"
"for none: its work is what a guest\n"
"does when its program has arrived, and the process ends with the number that it returns.  Return in the\n"
"launcher once the supervisor or the process behind the pidfd `keeper` is gone.  `home`\n"
"are the launcher's own net, ipc and uts namespaces; `hooks` tells that functions were registered to be\n"
"called after a fork (os.register_at_fork).  Raises ValueError for an invalid program.");

/* Have a guest do its work; nothing that it leaves is anybody else's to clean up. */
static void end_as_guest(PyObject *work)
{
    PyObject *code = PyObject_CallNoArgs(work);
    _exit(code && PyLong_Check(code) ? (int)PyLong_AsLong(code) : 1);
}

static PyObject *steps_serve(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    struct launcher launcher = {.events = -1, .ahead = 2};
    const char *bytes, *booted;
    Py_ssize_t length, booted_length;
    int hooks;
    struct rehearsal rehearsal = {.of_files = 0};
    if (!PyArg_ParseTuple(arguments, "y#iii(iii)ppy#(Oiiy#)", &bytes, &length, &launcher.sock, &launcher.nursery,
                          &launcher.keeper, &launcher.home[0], &launcher.home[1], &launcher.home[2],
                          &hooks, &launcher.opens_sockets, &booted, &booted_length, &rehearsal.work,
                          &rehearsal.near, &rehearsal.far, &rehearsal.regions, &rehearsal.length))
        return NULL;
    const char *wrong = load(&launcher.program, bytes, (size_t)length);
    if (!wrong && launcher.program.inputs == 0)
        wrong = "a cell is given no status channel";
    if (wrong)
        return refuse(wrong);
    launcher.thread_id = find_thread_id();
    launcher.room = 64;
    launcher.cells = mmap(NULL, launcher.room * sizeof(struct cell), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (launcher.cells == MAP_FAILED || keep_to_ourselves(launcher.cells, launcher.room))
        return PyErr_SetFromErrno(PyExc_OSError);
    /* The launcher has one thread, so the interpreter is as consistent in a child as it is here:
     * PyOS_AfterFork_Child has nothing to mend, and would copy 200 pages.  What its hooks are for
     * (random numbers) is done when a program comes, unless others than ours were registered. */
    if ((rehearsal.near >= 0 && rehearse_for(&launcher.program, &rehearsal))
        || send_packet(launcher.sock, booted, (size_t)booted_length, NULL, 0))
        return PyErr_SetFromErrno(PyExc_OSError);
    if (hooks)
        PyOS_BeforeFork();
    int outcome = serve(&launcher);
    if (hooks && outcome == IN_GUEST)
        PyOS_AfterFork_Child();
    else if (hooks)
        PyOS_AfterFork_Parent();
    if (outcome == IN_GUEST)
        end_as_guest(rehearsal.work);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(count_doc,
"count(program) -> int\n\n"
"Return how many steps a program has.  Raises ValueError for an invalid program.");

static PyObject *steps_count(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    struct program program;
    const char *bytes;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(arguments, "y#", &bytes, &length))
        return NULL;
    const char *wrong = load(&program, bytes, (size_t)length);
    if (wrong)
        return refuse(wrong);
    munmap(program.steps, program.mapped);
    return PyLong_FromUnsignedLong(program.count);
}

PyDoc_STRVAR(execute_doc,
"execute(program, inputs, pages=b'') -> tuple\n\n"
"Execute a program in this process, for tests and benchmarks: return (index, errno, words) of the first step that\n"
"the kernel refused, or () if none was.  `pages` are those to copy ahead.  Raises ValueError for an invalid\n"
"program.");

static PyObject *steps_execute(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    struct program program;
    const char *bytes;
    Py_ssize_t length, pages_length = 0;
    const char *pages = "";
    PyObject *inputs;
    if (!PyArg_ParseTuple(arguments, "y#O|y#", &bytes, &length, &inputs, &pages, &pages_length))
        return NULL;
    Py_ssize_t count = PySequence_Size(inputs);
    if (count < 0)
        return NULL;
    const char *wrong = count > INPUTS ? "it has too many inputs" : load(&program, bytes, (size_t)length);
    if (wrong)
        return refuse(wrong);
    program.pages = pages;
    program.pages_length = (size_t)pages_length;
    for (Py_ssize_t n = 0; n < INPUTS; n++)
        program.results[n] = -1;
    for (Py_ssize_t n = 0; n < count; n++) {
        PyObject *item = PySequence_GetItem(inputs, n);
        if (!item)
            break;
        program.results[n] = PyLong_AsLongLong(item);
        Py_DECREF(item);
        if (PyErr_Occurred())
            break;
    }
    PyObject *answer = NULL;
    if (!PyErr_Occurred()) {
        int64_t failed = execute(&program);
        answer = failed < 0
            ? PyTuple_New(0)
            : Py_BuildValue("(Lis)", (long long)failed, errno, program.data + program.steps[failed].words);
    }
    munmap(program.steps, program.mapped);
    return answer;
}

PyDoc_STRVAR(fork_doc,
"fork(flags=0, cgroup=-1, waits=False) -> int\n\n"
"Fork as `serve` does, without the hooks of os.register_at_fork, into the new namespaces of `flags` and\n"
"the v2 cgroup whose directory is open as `cgroup`; return 0 in the child.  If it `waits` the parent goes\n"
"on when the child has ended, and writes no page of what they share before.  Raises OSError.");

static PyObject *steps_fork(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    unsigned long long flags = 0;
    int cgroup = -1, pidfd = -1, waits = 0;
    if (!PyArg_ParseTuple(arguments, "|Kip", &flags, &cgroup, &waits))
        return NULL;
    pid_t pid = clone_process(flags, cgroup, find_thread_id(), &pidfd);
    if (pid < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    if (pid)
        close(pidfd);
    while (pid && waits && waitpid(pid, NULL, 0) < 0)
        if (errno != EINTR)
            return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLong(pid);
}

PyDoc_STRVAR(rehearse_doc,
"rehearse(work, near, far, regions, of_files=False) -> bytes\n\n"
"Fork a child that calls `work` with the socket `near` as its control channel, and return which pages of\n"
"`regions` (pairs of 64-bit start and end) it has written, or, `of_files`, which pages of files it has\n"
"used, as pairs of address and length.  Closes `near` and `far`, its other end.  Raises OSError if there\n"
"is no such child.");

static PyObject *steps_rehearse(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    struct rehearsal rehearsal = {.of_files = 0};
    if (!PyArg_ParseTuple(arguments, "Oiiy#|p", &rehearsal.work, &rehearsal.near, &rehearsal.far,
                          &rehearsal.regions, &rehearsal.length, &rehearsal.of_files))
        return NULL;
    struct found *found = rehearse(&rehearsal);
    if (!found)
        return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *pages = PyBytes_FromStringAndSize(
        (char *)found->ranges, (Py_ssize_t)(found->count * sizeof *found->ranges));
    munmap(found, sizeof *found);
    return pages;
}

PyDoc_STRVAR(gather_doc,
"gather(regions) -> int\n\n"
"Move the private memory of `regions` (pairs of 64-bit start and end), which stays at its addresses, into huge\n"
"pages that are mapped in small ones: a fork then copies the references to a huge page in one step, and so does\n"
"its end.  Return the bytes that were moved: 0 if the kernel has no huge pages, when nothing changes.  No\n"
"region may hold the stack, or the memory of another thread.  Raises OSError; then this process is lost.");

static PyObject *steps_gather(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    static const size_t huge = 2 << 20;
    const char *regions;
    Py_ssize_t length;
    size_t whole = 0, count, moved = 0;
    if (!PyArg_ParseTuple(arguments, "y#", &regions, &length))
        return NULL;
    count = (size_t)length / 16;
    uint64_t (*spans)[2] = mmap(NULL, (size_t)length + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (spans == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    memcpy(spans, regions, count * sizeof *spans); /* the bytes are themselves in what is moved */
    for (size_t n = 0; n < count; n++)
        whole += spans[n][1] - spans[n][0];
    char *place = mmap(NULL, whole + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    char *from = (char *)(((uintptr_t)place + huge - 1) & ~(huge - 1)), *at = from;
    for (size_t n = 0; n < count; at += spans[n][1] - spans[n][0], n++)
        memcpy(at, (void *)(uintptr_t)spans[n][0], spans[n][1] - spans[n][0]);
    int refused = whole < huge || madvise(from, whole & ~(huge - 1), MADV_COLLAPSE);
    for (size_t n = 0; n < count && !refused; n++) {
        size_t size = spans[n][1] - spans[n][0];
        if (mremap(from + moved, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(uintptr_t)spans[n][0]) == MAP_FAILED)
            return PyErr_SetFromErrno(PyExc_OSError);
        moved += size;
    }
    munmap(place, (size_t)(from - place));
    munmap(from + moved, huge - (size_t)(from - place) + whole - moved);
    munmap(spans, (size_t)length + 1);
    return PyLong_FromSize_t(moved);
}

/* system calls that are made at once, for kernel/__init__.py */

/* What the kernel is given for `argument`; -1 with an exception for what is no argument.  Bytes are read in
 * place, a bytearray is written too. */
static int as_argument(PyObject *argument, long *value)
{
    if (argument == Py_None)
        *value = 0;
    else if (PyLong_Check(argument))
        *value = (long)PyLong_AsUnsignedLongMask(argument);
    else if (PyBytes_Check(argument))
        *value = (long)PyBytes_AsString(argument);
    else if (PyByteArray_Check(argument))
        *value = (long)PyByteArray_AsString(argument);
    else
        PyErr_SetString(PyExc_TypeError, "a system call takes numbers, bytes, bytearrays and None");
    return PyErr_Occurred() ? -1 : 0;
}

PyDoc_STRVAR(syscall_doc,
"syscall(number, *arguments) -> int\n\n"
"Make a system call with up to six arguments; return what the kernel answered, or the negative errno.");

static PyObject *steps_syscall(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    long value[1 + ARGUMENTS] = {0};
    Py_ssize_t count = PyTuple_Size(arguments);
    if (count < 1 || count > 1 + ARGUMENTS) {
        PyErr_SetString(PyExc_TypeError, "a system call has a number and up to six arguments");
        return NULL;
    }
    for (Py_ssize_t n = 0; n < count; n++)
        if (as_argument(PyTuple_GetItem(arguments, n), &value[n]))
            return NULL;
    long answer = syscall(value[0], value[1], value[2], value[3], value[4], value[5], value[6]);
    return PyLong_FromLong(answer == -1 ? -errno : answer);
}

PyDoc_STRVAR(address_doc,
"address(memory) -> int\n\n"
"Return where a bytearray or memoryview lies, for structures that hold pointers; it must neither end nor change\n"
"its length.");

static PyObject *steps_address(PyObject *Py_UNUSED(module), PyObject *memory)
{
    Py_buffer view;
    if (PyBytes_Check(memory)) {
        PyErr_SetString(PyExc_TypeError, "only a bytearray or a memoryview has an address");
        return NULL;
    }
    if (PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE))
        return NULL;
    void *address = view.buf;
    PyBuffer_Release(&view);
    return PyLong_FromVoidPtr(address);
}

/* What an init is made of, and what came of it. */
struct nest {
    int flags, proc;
    int descriptors[1 + NAMESPACES]; /* -1: not open */
    int error;
    const char *refused;
};

/* Make namespaces and an init that sleeps in them, and open both; the caller waits, and has what is opened.
 * Only who is in a namespace can open it without being dumpable, and an init that shares its memory with
 * somebody dumpable shows a program its descriptors: so the caller's child goes there, and ends there. */
static int make_nest(void *given)
{
    static const char *const names[NAMESPACES] = {"self/ns/pid_for_children", "self/ns/net", "self/ns/ipc", "self/ns/uts"};
    static _Alignas(16) char stack[4096]; /* of all that sleep: none ever returns to it */
    static const int shared = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_PIDFD | SIGCHLD;
    struct nest *nest = given;
    nest->refused = "unshare, for the namespaces of an init";
    if (unshare(nest->flags))
        goto failed;
    nest->refused = "clone of an init";
    if (clone((int (*)(void *))(void (*)(void))pause, stack + sizeof stack, shared, NULL, &nest->descriptors[0]) < 0)
        goto failed;
    nest->refused = "opening the namespaces of an init";
    for (int n = 0; n < NAMESPACES; n++) {
        nest->descriptors[1 + n] = openat(nest->proc, names[n], O_RDONLY | O_CLOEXEC);
        if (nest->descriptors[1 + n] < 0)
            goto failed;
    }
    nest->refused = NULL;
    return 0;
failed:
    nest->error = errno;
    return 1;
}

PyDoc_STRVAR(sleeper_doc,
"sleeper(flags, proc) -> (pidfd, pid, net, ipc, uts)\n\n"
"Start a process in new namespaces, those of `flags`, that is in pause(2) until it is killed.  It executes nothing\n"
"else, so it shares memory and descriptors with this one, which has to ignore SIGCHLD; return its pidfd and\n"
"namespaces.  `proc` is /proc of this pid namespace.  Raises OSError, whose filename says what was refused.");

static PyObject *steps_sleeper(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    static _Alignas(16) char stack[16384];
    static const int waits = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_VFORK | SIGCHLD;
    struct nest nest = {.descriptors = {-1, -1, -1, -1, -1}, .error = ESRCH, .refused = "clone for an init"};
    if (!PyArg_ParseTuple(arguments, "ii", &nest.flags, &nest.proc))
        return NULL;
    if (clone(make_nest, stack + sizeof stack, waits, &nest) < 0)
        nest.error = errno;
    if (nest.refused) {
        if (nest.descriptors[0] >= 0)
            (void)syscall(NR_PIDFD_SEND_SIGNAL, nest.descriptors[0], SIGKILL, NULL, 0);
        for (int n = 0; n <= NAMESPACES; n++)
            if (nest.descriptors[n] >= 0)
                (void)close(nest.descriptors[n]);
        errno = nest.error;
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, nest.refused);
    }
    int *made = nest.descriptors;
    return Py_BuildValue("(iiiii)", made[0], made[1], made[2], made[3], made[4]);
}

PyDoc_STRVAR(share_arena_doc,
"share_arena() -> None\n\n"
"Have all threads take memory from one arena of malloc(3): glibc reserves 64 MiB of address space for each other.");

static PyObject *steps_share_arena(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
#ifdef M_ARENA_MAX
    (void)mallopt(M_ARENA_MAX, 1);
#endif
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"syscall", steps_syscall, METH_VARARGS, syscall_doc},
    {"address", steps_address, METH_O, address_doc},
    {"share_arena", steps_share_arena, METH_NOARGS, share_arena_doc},
    {"sleeper", steps_sleeper, METH_VARARGS, sleeper_doc},
    {"rehearse", steps_rehearse, METH_VARARGS, rehearse_doc},
    {"gather", steps_gather, METH_VARARGS, gather_doc},
    {"fork", steps_fork, METH_VARARGS, fork_doc},
    {"serve", steps_serve, METH_VARARGS, serve_doc},
    {"count", steps_count, METH_VARARGS, count_doc},
    {"execute", steps_execute, METH_VARARGS, execute_doc},
    {NULL, NULL, 0, NULL},
};

static const struct {
    const char *name;
    int number;
} NUMBERS[] = {
    {"bind", SYS_bind}, {"capget", SYS_capget}, {"capset", SYS_capset}, {"chdir", SYS_chdir}, {"close", SYS_close}, {"dup3", SYS_dup3},
    {"get_robust_list", SYS_get_robust_list},
    {"fchmod", SYS_fchmod}, {"getpid", SYS_getpid}, {"ioctl", SYS_ioctl}, {"listen", SYS_listen}, {"madvise", SYS_madvise},
    {"mkdirat", SYS_mkdirat}, {"mount", SYS_mount}, {"mprotect", SYS_mprotect}, {"openat", SYS_openat}, {"pivot_root", SYS_pivot_root},
    {"personality", SYS_personality}, {"prctl", SYS_prctl}, {"process_vm_readv", SYS_process_vm_readv},
    {"process_vm_writev", SYS_process_vm_writev}, {"ptrace", SYS_ptrace}, {"setdomainname", SYS_setdomainname},
    {"sethostname", SYS_sethostname}, {"setns", SYS_setns}, {"umount2", SYS_umount2},
    {"prlimit64", SYS_prlimit64}, {"rt_sigaction", SYS_rt_sigaction}, {"seccomp", SYS_seccomp}, {"setsid", SYS_setsid},
    {"socket", SYS_socket}, {"symlinkat", SYS_symlinkat}, {"umask", SYS_umask}, {"unshare", SYS_unshare}, {"write", SYS_write},
    {"open_tree", NR_OPEN_TREE}, {"move_mount", NR_MOVE_MOUNT}, {"fsopen", NR_FSOPEN},
    {"fsconfig", NR_FSCONFIG}, {"fsmount", NR_FSMOUNT}, {"pidfd_open", NR_PIDFD_OPEN},
    {"close_range", NR_CLOSE_RANGE}, {"openat2", NR_OPENAT2}, {"pidfd_getfd", NR_PIDFD_GETFD},
    {"mount_setattr", NR_MOUNT_SETATTR},
    {"landlock_create_ruleset", NR_LANDLOCK_CREATE_RULESET},
    {"landlock_add_rule", NR_LANDLOCK_ADD_RULE},
    {"landlock_restrict_self", NR_LANDLOCK_RESTRICT_SELF},
};

static int add_numbers(PyObject *module)
{
    PyObject *numbers = PyDict_New();
    if (!numbers)
        return -1;
    for (size_t n = 0; n < sizeof NUMBERS / sizeof *NUMBERS; n++) {
        PyObject *number = PyLong_FromLong(NUMBERS[n].number);
        if (!number || PyDict_SetItemString(numbers, NUMBERS[n].name, number)) {
            Py_XDECREF(number);
            Py_DECREF(numbers);
            return -1;
        }
        Py_DECREF(number);
    }
    int failed = PyModule_AddObjectRef(module, "NUMBERS", numbers);
    Py_DECREF(numbers);
    return failed;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_numbers}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_steps",
    .m_doc = "System calls as data, and the loop that forks cells.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__steps(void)
{
    return PyModuleDef_Init(&module);
}
