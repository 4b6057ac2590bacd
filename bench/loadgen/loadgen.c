// One client program for every server that speaks the TCPStore wire protocol: epoll, one thread, real sockets,
// every reply verified. Options, modes and output: README.md beside this file.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#ifndef IP_BIND_ADDRESS_NO_PORT
#define IP_BIND_ADDRESS_NO_PORT 24
#endif
#define MAXD 64
#define IDS_BYTES 128
enum { ST_NONE, ST_CONN, ST_PONG, ST_INIT, ST_READY, ST_B1, ST_B2, ST_BW, ST_RUN };
enum { OP_SETGET, OP_ADD, OP_CHECK, OP_GET, OP_TGET, OP_MGET, OP_BIGSET, OP_BIGGET, OP_PING, OP_SET };
static const char *OPN[] = {"setget", "add",    "check",  "get",  "tget",
                            "mget",   "bigset", "bigget", "ping", "set"};
typedef struct {
  int fd;
  uint8_t st;
  uint8_t fixed;
  uint8_t hn;
  uint8_t phase;
  uint8_t hb[8];
  uint32_t nvec;
  uint32_t nvec_total;
  uint64_t rem;
  uint64_t rlen;
  int64_t last;
  uint32_t h, t;
  uint64_t t0;
  uint64_t *ts;
  uint8_t inrep;
} conn;
static conn *C;
static int N = 64, conc = 512, depth = 1, port, rounds = 10, nk = 1000;
static size_t bsz = 1 << 20;
static int srvpid = 0;
static double secs = 1.0, warm = 0.2;
static char host[64] = "127.0.0.1";
static int ep;
static char *tag = "x";
static int sigstop = 0, gap = 0;
static uint64_t now() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
static void die(const char *m) {
  int e = errno;
  fprintf(stderr, "loadgen: %s: %s\n", m, strerror(e));
  printf("{\"error\":\"%s: %s\",\"errno\":%d}\n", m, strerror(e), e);
  fflush(stdout);
  exit(1);
}
static uint64_t srvcpu() {
  if (!srvpid)
    return 0;
  char p[128];
  snprintf(p, 128, "/proc/%d/task", srvpid);
  DIR *d = opendir(p);
  if (!d)
    return 0;
  uint64_t s = 0;
  struct dirent *e;
  while ((e = readdir(d))) {
    if (e->d_name[0] == '.')
      continue;
    char q[320];
    snprintf(q, sizeof q, "/proc/%d/task/%s/schedstat", srvpid, e->d_name);
    FILE *f = fopen(q, "r");
    if (f) {
      unsigned long long a = 0;
      if (fscanf(f, "%llu", &a) == 1)
        s += a;
      fclose(f);
    }
  }
  closedir(d);
  return s;
}
static long srvrss() {
  if (!srvpid)
    return 0;
  char p[64];
  snprintf(p, 64, "/proc/%d/statm", srvpid);
  FILE *f = fopen(p, "r");
  if (!f)
    return 0;
  long a, b = 0;
  if (fscanf(f, "%ld %ld", &a, &b) != 2)
    b = 0;
  fclose(f);
  return b * 4096;
}
static uint64_t mycpu() {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
// histogram: log2 with 32 sub-buckets
static uint64_t H[64 * 32];
static void hadd(uint64_t v) {
  int e = v < 32 ? 0 : 63 - __builtin_clzll(v) - 5 + 1;
  int s = e ? (int)((v >> (e - 1)) & 31) : (int)v;
  H[e * 32 + s]++;
}
static double hq(double q) {
  uint64_t tot = 0;
  for (int i = 0; i < 2048; i++)
    tot += H[i];
  uint64_t a = 0;
  for (int i = 0; i < 2048; i++) {
    a += H[i];
    if (a >= tot * q && a > 0) {
      int e = i / 32, s = i % 32;
      return e ? (double)((uint64_t)(32 + s) << (e - 1)) : s;
    }
  }
  return 0;
}
static void sendall(conn *c, const void *b, size_t n) {
  const char *p = b;
  while (n) {
    ssize_t k = send(c->fd, p, n, MSG_NOSIGNAL);
    if (k < 0) {
      if (errno == EAGAIN) {
        struct pollfd pf = {c->fd, POLLOUT, 0};
        poll(&pf, 1, 10000);
        continue;
      }
      if (errno == EINTR)
        continue;
      die("send");
    }
    p += k;
    n -= k;
  }
}
static char *P(char *p, const void *b, size_t n) {
  memcpy(p, b, n);
  return p + n;
}
static char *P64(char *p, uint64_t v) { return P(p, &v, 8); }
static char *PS(char *p, const char *s) {
  size_t n = strlen(s);
  p = P64(p, n);
  return P(p, s, n);
}
static void expect_fixed(conn *c, int n) {
  c->fixed = n;
  c->nvec_total = 0;
}
static void expect_vec(conn *c, uint32_t n) {
  c->fixed = 0;
  c->nvec_total = n;
}
static void begin_rep(conn *c) {
  c->inrep = 1;
  c->hn = 0;
  c->rem = 0;
  c->nvec = c->nvec_total;
}
// returns consumed; sets *done if one reply complete
static size_t feed1(conn *c, const uint8_t *b, size_t n, int *done) {
  size_t i = 0;
  *done = 0;
  if (!c->inrep)
    begin_rep(c);
  if (c->fixed) {
    size_t k = c->fixed - c->hn;
    if (k > n)
      k = n;
    memcpy(c->hb + c->hn, b, k);
    c->hn += k;
    i = k;
    if (c->hn == c->fixed) {
      *done = 1;
      c->inrep = 0;
    }
    return i;
  }
  while (i < n) {
    if (c->rem) {
      size_t k = c->rem < n - i ? c->rem : n - i;
      c->rem -= k;
      i += k;
      if (c->rem == 0) {
        c->hn = 0;
        if (--c->nvec == 0) {
          *done = 1;
          c->inrep = 0;
          return i;
        }
      }
      continue;
    }
    size_t k = 8 - c->hn;
    if (k > n - i)
      k = n - i;
    memcpy(c->hb + c->hn, b + i, k);
    c->hn += k;
    i += k;
    if (c->hn == 8) {
      memcpy(&c->rlen, c->hb, 8);
      c->rem = c->rlen;
      c->hn = 0;
      if (c->rem == 0) {
        if (--c->nvec == 0) {
          *done = 1;
          c->inrep = 0;
          return i;
        }
      }
    }
  }
  return i;
}
static char *BB; // send build buffer
static uint8_t *RB;
static size_t RBN = 1 << 18;
// receive what there is into RB; -1 if there is nothing
static ssize_t receive(conn *c, const char *what) {
  ssize_t n = recv(c->fd, RB, RBN, 0);
  if (n == 0)
    errno = ECONNRESET;
  if (n == 0 || (n < 0 && errno != EAGAIN))
    die(what);
  return n;
}
static struct epoll_event *EV;
static int NEV = 1024;
// ---- init
static int nstarted = 0, nready = 0;
static uint64_t *tconn;
static int per_source = 20000; // connections from one address
static void start_conn(int i) {
  conn *c = &C[i];
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (c->fd < 0)
    die("socket");
  int one = 1;
  struct sockaddr_in a = {.sin_family = AF_INET};
  char s[32];
  snprintf(s, 32, "127.0.1.%d", 1 + i / per_source);
  inet_pton(AF_INET, s, &a.sin_addr);
  setsockopt(c->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, 4);
  if (N > per_source && bind(c->fd, (void *)&a, sizeof a))
    die("bind");
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, 4);
  struct sockaddr_in d = {.sin_family = AF_INET, .sin_port = htons(port)};
  inet_pton(AF_INET, host, &d.sin_addr);
  c->st = ST_CONN;
  tconn[i] = now();
  if (connect(c->fd, (void *)&d, sizeof d) && errno != EINPROGRESS)
    die("connect");
  struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.u32 = i};
  if (epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e))
    die("epoll_ctl");
  nstarted++;
}
static void add_msg(conn *c, const char *key, int64_t v) {
  char b[256], *p = b;
  *p++ = 4;
  p = PS(p, key);
  p = P64(p, v);
  expect_fixed(c, 8);
  sendall(c, b, p - b);
}
static void check_connected(conn *c) {
  int e = 0;
  socklen_t l = 4;
  getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &e, &l);
  if (e) {
    errno = e;
    die("connect result");
  }
}
static void on_connected(conn *c, int i) {
  check_connected(c);
  char v[5] = {0};
  uint32_t m = 0x3C85F7CE;
  memcpy(v + 1, &m, 4);
  sendall(c, v, 5);
  char g[5] = {13};
  uint32_t nonce = i * 2654435761u;
  memcpy(g + 1, &nonce, 4);
  expect_fixed(c, 4);
  c->st = ST_PONG;
  sendall(c, g, 5);
}
static void do_init(int quiet) {
  uint64_t T0 = now(), c0 = srvcpu(), m0 = mycpu();
  long r0 = srvrss();
  uint64_t maxl = 0;
  memset(H, 0, sizeof H);
  if (sigstop) {
    kill(srvpid, SIGSTOP);
    usleep(20000);
    while (nstarted < N)
      start_conn(nstarted);
    for (int sent = 0, k = 1; sent < N && k > 0;) { // what ranks send without waiting for a reply
      k = epoll_wait(ep, EV, NEV, 2000);
      for (int j = 0; j < k; j++)
        if (C[EV[j].data.u32].st == ST_CONN) {
          on_connected(&C[EV[j].data.u32], EV[j].data.u32);
          sent++;
        }
    }
    kill(srvpid, SIGCONT);
    T0 = now();
    m0 = mycpu();
    for (int i = 0; i < N; i++)
      tconn[i] = T0;
  }
  while (nready < N) {
    int budget = 256;
    while (nstarted < N && nstarted - nready < conc && budget-- > 0)
      start_conn(nstarted);
    int k = epoll_wait(ep, EV, NEV, nstarted < N && nstarted - nready < conc ? 0 : 30000);
    if (k < 0) {
      if (errno == EINTR)
        continue;
      die("epoll_wait");
    }
    if (k == 0 && !(nstarted < N && nstarted - nready < conc)) {
      fprintf(stderr, "stall: started %d ready %d\n", nstarted, nready);
      errno = ETIMEDOUT;
      die("init stall");
    }
    for (int j = 0; j < k; j++) {
      int i = EV[j].data.u32;
      conn *c = &C[i];
      uint32_t ev = EV[j].events;
      if (c->st == ST_CONN) {
        if (ev & (EPOLLOUT | EPOLLERR | EPOLLHUP))
          on_connected(c, i);
        else
          continue;
      }
      if (ev & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        ssize_t n = receive(c, "recv init");
        size_t o = 0;
        while (n > 0 && o < (size_t)n) {
          int d;
          o += feed1(c, RB + o, n - o, &d);
          if (d) {
            if (c->st == ST_PONG) {
              uint32_t x;
              memcpy(&x, c->hb, 4);
              if (x != (uint32_t)(i * 2654435761u)) {
                errno = EPROTO;
                die("bad pong");
              }
              c->st = ST_INIT;
              add_msg(c, "init/", 1);
            } else if (c->st == ST_INIT) {
              c->st = ST_READY;
              nready++;
              uint64_t l = now() - tconn[i];
              if (l > maxl)
                maxl = l;
              hadd(l);
            } else {
              errno = EPROTO;
              die("unexpected");
            }
          }
        }
      }
    }
  }
  uint64_t T1 = now(), c1 = srvcpu();
  usleep(100000);
  long r1 = srvrss();
  if (!quiet)
    printf("{\"tag\":\"%s\",\"mode\":\"init\",\"n\":%d,\"conc\":%d,\"wall_ms\":%.2f,\"srv_cpu_us_per_conn\":%"
           ".2f,\"lg_cpu_us_per_conn\":%.2f,\"p50_us\":%.0f,\"p99_us\":%.0f,\"max_ms\":%.1f,\"rss_per_conn\":"
           "%.0f,\"rss_mb\":%.1f}\n",
           tag, N, conc, (T1 - T0) / 1e6, (c1 - c0) / 1e3 / N, (mycpu() - m0) / 1e3 / N, hq(.5) / 1e3,
           hq(.99) / 1e3, maxl / 1e6, (double)(r1 - r0) / N, r1 / 1048576.0);
  fflush(stdout);
}
// wait until something has arrived, for so many milliseconds at most
static int wait_events(int ms, const char *stall) {
  int k;
  do
    k = epoll_wait(ep, EV, NEV, ms);
  while (k < 0 && errno == EINTR);
  if (k <= 0) {
    errno = ETIMEDOUT;
    die(stall);
  }
  return k;
}
// BARRIER, opcode 18: one request and one reply for every rank
static void do_barrier_opcode() {
  double total = 0, least = 1e18, cpu = 0, own = 0;
  for (int r = 0; r < rounds; r++) {
    char key[64], request[128], *p = request;
    snprintf(key, sizeof key, "/barrier:%d:%d", getpid(), r);
    *p++ = 18;
    p = PS(p, key);
    p = P64(p, N);
    uint64_t T0 = now(), c0 = srvcpu(), m0 = mycpu();
    int done = 0;
    for (int i = 0; i < N; i++) {
      expect_fixed(&C[i], 1);
      sendall(&C[i], request, p - request);
    }
    while (done < N) {
      int k = wait_events(30000, "barrier opcode stall");
      for (int j = 0; j < k; j++) {
        conn *c = &C[EV[j].data.u32];
        if (!(EV[j].events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
          continue;
        ssize_t n = recv(c->fd, RB, RBN, 0);
        if (n < 0 && errno == EAGAIN)
          continue;
        if (n != 1 || RB[0] != 0) {
          errno = n == 0 ? ECONNRESET : EPROTO;
          die("barrier opcode reply");
        }
        done++;
      }
    }
    double ms = (now() - T0) / 1e6;
    total += ms;
    if (ms < least)
      least = ms;
    cpu += (srvcpu() - c0) / 1e3;
    own += (mycpu() - m0) / 1e3;
  }
  printf("{\"tag\":\"%s\",\"mode\":\"barrier18\",\"n\":%d,\"rounds\":%d,\"mean_ms\":%.2f,\"min_ms\":%.2f,"
         "\"srv_cpu_us_per_rank\":%.2f,\"lg_cpu_us_per_rank\":%.2f}\n",
         tag, N, rounds, total / rounds, least, cpu / rounds / N, own / rounds / N);
  fflush(stdout);
}
static void do_barrier() {
  static double ms[1000];
  double cpu = 0, own = 0;
  for (int r = 0; r < rounds; r++) {
    char key[64], lw[96];
    snprintf(key, 64, "/store_based_barrier_key:%d:%d", getpid(), r);
    snprintf(lw, 96, "%s:last_worker", key);
    char m1[256], *p = m1;
    *p++ = 4;
    p = PS(p, key);
    p = P64(p, 1);
    size_t n1 = p - m1;
    char m2[256];
    p = m2;
    *p++ = 4;
    p = PS(p, key);
    p = P64(p, 0);
    size_t n2 = p - m2;
    char ms_[256];
    p = ms_;
    *p++ = 1;
    p = PS(p, lw);
    p = PS(p, "1");
    size_t ns = p - ms_;
    char mw[256];
    p = mw;
    *p++ = 6;
    p = P64(p, 1);
    p = PS(p, lw);
    size_t nw = p - mw;
    uint64_t T0 = now(), c0 = srvcpu(), m0 = mycpu();
    int done = 0;
    for (int i = 0; i < N; i++) {
      conn *c = &C[i];
      c->st = ST_B1;
      expect_fixed(c, 8);
      sendall(c, m1, n1);
    }
    while (done < N) {
      int k = wait_events(30000, "barrier stall");
      for (int j = 0; j < k; j++) {
        conn *c = &C[EV[j].data.u32];
        if (!(EV[j].events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
          continue;
        ssize_t n = receive(c, "recv barrier");
        size_t o = 0;
        while (n > 0 && o < (size_t)n) {
          int d;
          o += feed1(c, RB + o, n - o, &d);
          if (!d)
            continue;
          if (c->st == ST_B1) {
            c->st = ST_B2;
            sendall(c, m2, n2);
          } else if (c->st == ST_B2) {
            int64_t v;
            memcpy(&v, c->hb, 8);
            if (v == N)
              sendall(c, ms_, ns);
            if (v > N) {
              errno = EPROTO;
              die("barrier count");
            }
            c->st = ST_BW;
            expect_fixed(c, 1);
            sendall(c, mw, nw);
          } else if (c->st == ST_BW) {
            if (c->hb[0] != 0) {
              errno = EPROTO;
              die("wait reply");
            }
            c->st = ST_READY;
            done++;
          } else {
            errno = EPROTO;
            die("unexpected b");
          }
        }
      }
    }
    ms[r] = (now() - T0) / 1e6;
    cpu += (srvcpu() - c0) / 1e3;
    own += (mycpu() - m0) / 1e3;
  }
  double s = 0, mn = 1e18;
  for (int i = 0; i < rounds; i++) {
    s += ms[i];
    if (ms[i] < mn)
      mn = ms[i];
  }
  printf("{\"tag\":\"%s\",\"mode\":\"barrier\",\"n\":%d,\"rounds\":%d,\"mean_ms\":%.2f,\"min_ms\":%.2f,\"srv_"
         "cpu_us_per_rank\":%.2f,\"lg_cpu_us_per_rank\":%.2f}\n",
         tag, N, rounds, s / rounds, mn, cpu / rounds / N, own / rounds / N);
  fflush(stdout);
}
// ---- throughput
static char val100[100];
static char *bigv;
static char *req(char *p, conn *c, int op, int i) {
  char key[64];
  switch (op) {
  case OP_SETGET:
    snprintf(key, 64, "/k%07d", i);
    *p++ = 1;
    p = PS(p, key);
    p = P64(p, 100);
    p = P(p, val100, 100);
    *p++ = 3;
    p = PS(p, key);
    break;
  case OP_SET:
    snprintf(key, 64, "/k%07d", i);
    *p++ = 1;
    p = PS(p, key);
    p = P64(p, 100);
    p = P(p, val100, 100);
    break;
  case OP_ADD:
    snprintf(key, 64, "/a%07d", i);
    *p++ = 4;
    p = PS(p, key);
    p = P64(p, 1);
    break;
  case OP_CHECK:
    *p++ = 5;
    p = P64(p, 1);
    p = PS(p, "/chk");
    break;
  case OP_GET:
    *p++ = 3;
    p = PS(p, "/g100");
    break;
  case OP_TGET:
    if (c->phase == 0) {
      *p++ = 6;
      p = P64(p, 1);
      p = PS(p, "/g100");
    } else {
      *p++ = 3;
      p = PS(p, "/g100");
    }
    break;
  case OP_PING: {
    *p++ = 13;
    uint32_t v = i;
    p = P(p, &v, 4);
    break;
  }
  case OP_MGET:
    *p++ = 10;
    p = P64(p, nk);
    for (int j = 0; j < nk; j++) {
      snprintf(key, 64, "/mk%06d", j);
      p = PS(p, key);
    }
    break;
  case OP_BIGSET:
    *p++ = 1;
    p = PS(p, "/big");
    p = P64(p, bsz);
    p = P(p, bigv, bsz);
    *p++ = 13;
    {
      uint32_t v = 7;
      p = P(p, &v, 4);
    }
    break;
  case OP_BIGGET:
    *p++ = 3;
    p = PS(p, "/big");
    break;
  }
  return p;
}
static void expect(conn *c, int op) {
  switch (op) {
  case OP_SETGET:
  case OP_GET:
  case OP_BIGGET:
    expect_vec(c, 1);
    break;
  case OP_ADD:
    expect_fixed(c, 8);
    break;
  case OP_CHECK:
    expect_fixed(c, 1);
    break;
  case OP_PING:
  case OP_BIGSET:
    expect_fixed(c, 4);
    break;
  case OP_MGET:
    expect_vec(c, nk);
    break;
  case OP_TGET:
    if (c->phase == 0)
      expect_fixed(c, 1);
    else
      expect_vec(c, 1);
    break;
  }
}
static void seed() {
  conn *c = &C[0];
  char *p = BB;
  *p++ = 1;
  p = PS(p, "/chk");
  p = PS(p, "1");
  *p++ = 1;
  p = PS(p, "/g100");
  p = P64(p, 100);
  p = P(p, val100, 100);
  sendall(c, BB, p - BB);
  p = BB;
  for (int j = 0; j < nk; j++) {
    char key[64];
    snprintf(key, 64, "/mk%06d", j);
    *p++ = 1;
    p = PS(p, key);
    p = PS(p, "v0123456789abcde");
  }
  sendall(c, BB, p - BB);
  p = BB;
  *p++ = 1;
  p = PS(p, "/big");
  p = P64(p, bsz);
  p = P(p, bigv, bsz);
  sendall(c, BB, p - BB);
  usleep(50000);
}
static void do_tput(int op) {
  memset(H, 0, sizeof H);
  for (int i = 0; i < N; i++) {
    C[i].ts = calloc(MAXD, 8);
    C[i].h = C[i].t = 0;
    C[i].last = 0;
    C[i].phase = 0;
  }
  for (int i = 0; i < N; i++) {
    conn *c = &C[i];
    c->st = ST_RUN;
    c->hn = 0;
    c->inrep = 0;
    expect(c, op);
  }
  uint64_t T0 = now();
  for (int i = 0; i < N; i++) {
    conn *c = &C[i];
    char *p = BB;
    for (int d = 0; d < depth; d++) {
      p = req(p, c, op, i);
      c->ts[c->h++ % MAXD] = now();
    }
    sendall(c, BB, p - BB);
  }
  uint64_t TW = T0 + warm * 1e9, TE = 0;
  uint64_t c0 = 0, m0 = 0, ops = 0, TS = 0;
  int measuring = 0;
  int outst = N * depth;
  int stop = 0;
  uint64_t c1 = 0, m1 = 0, T1 = 0;
  while (outst > 0) {
    int k = wait_events(10000, "tput stall");
    uint64_t t = now();
    if (!measuring && t >= TW) {
      measuring = 1;
      c0 = srvcpu();
      m0 = mycpu();
      TS = now();
      TE = TS + secs * 1e9;
      ops = 0;
      t = TS;
    }
    if (!stop && ops && t >= TE) { // even if this process was off its core in the meantime
      stop = 1;
      T1 = t;
      c1 = srvcpu();
      m1 = mycpu();
    }
    for (int j = 0; j < k; j++) {
      int i = EV[j].data.u32;
      conn *c = &C[i];
      if (!(EV[j].events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        continue;
      char *p = BB;
      while (1) {
        ssize_t n = receive(c, "recv tput");
        if (n < 0)
          break;
        size_t o = 0;
        uint64_t tn = now();
        while (o < (size_t)n) {
          int d;
          o += feed1(c, RB + o, n - o, &d);
          if (!d)
            continue;
          if (op == OP_TGET) {
            if (c->phase == 0) {
              if (c->hb[0] != 0) {
                errno = EPROTO;
                die("tget wait");
              }
              c->phase = 1;
              expect(c, op);
              p = req(p, c, op, i);
              continue;
            }
            c->phase = 0;
            expect(c, op);
          }
          if (op == OP_ADD) {
            int64_t v;
            memcpy(&v, c->hb, 8);
            if (c->last && v != c->last + 1) {
              errno = EPROTO;
              die("add seq");
            }
            c->last = v;
          } else if (op == OP_GET || op == OP_SETGET || op == OP_TGET) {
            if (c->rlen != 100) {
              errno = EPROTO;
              die("get len");
            }
          } else if (op == OP_CHECK) {
            if (c->hb[0] != 0) {
              errno = EPROTO;
              die("check");
            }
          } else if (op == OP_MGET) {
            if (c->rlen != 16) {
              errno = EPROTO;
              die("mget len");
            }
          } else if (op == OP_BIGGET) {
            if (c->rlen != bsz) {
              errno = EPROTO;
              die("big len");
            }
          }
          uint64_t t0 = c->ts[c->t++ % MAXD];
          if (measuring && !stop) {
            hadd(tn - t0);
            ops++;
          }
          if (!stop) {
            p = req(p, c, op, i);
            c->ts[c->h++ % MAXD] = tn;
          } else
            outst--;
        }
        if ((size_t)n < RBN)
          break;
      }
      if (p != BB) {
        if (gap) {
          usleep(gap);
          c->ts[(c->h - 1) % MAXD] = now();
        }
        sendall(c, BB, p - BB);
      }
    }
  }
  double dt = (T1 - TS) / 1e9;
  printf("{\"tag\":\"%s\",\"mode\":\"tput\",\"op\":\"%s\",\"c\":%d,\"depth\":%d,\"ops\":%.0f,\"p50_us\":%.1f,"
         "\"p99_us\":%.1f,\"srv_cpu_us_per_op\":%.3f,\"lg_cpu_us_per_op\":%.3f,\"srv_util\":%.2f,\"mb_s\":%."
         "1f}\n",
         tag, OPN[op], N, depth, ops / dt, hq(.5) / 1e3, hq(.99) / 1e3, ops ? (c1 - c0) / 1e3 / ops : 0,
         ops ? (m1 - m0) / 1e3 / ops : 0, (c1 - c0) / 1e9 / dt,
         (op == OP_BIGGET || op == OP_BIGSET) ? ops / dt * bsz / 1e6 : 0);
  fflush(stdout);
  for (int i = 0; i < N; i++) {
    free(C[i].ts);
    C[i].st = ST_READY;
    C[i].inrep = 0;
  }
}
// ---- NCCL's IDs: connection 0 is the roots, which SET nk keys; every other one is a rank, all of which send the
// same bytes
enum { IDS_NEW, IDS_PARKED, IDS_SET };
static int ids_state = IDS_NEW, ids_generation = 0;
static char *ids_reply;
static const char *ids_key(int j) {
  static char key[64];
  static uint32_t run = 0;
  if (!run)
    run = (uint32_t)(now() >> 10) * 31 + getpid();
  snprintf(key, sizeof key, "/default_pg/0//cuda//nccl_storekey_%08x_%03d", run + ids_generation, j);
  return key;
}
static size_t ids_request(int op) {
  char *p = BB;
  *p++ = op;
  p = P64(p, nk);
  for (int j = 0; j < nk; j++)
    p = PS(p, ids_key(j));
  return p - BB;
}
static void ids_set() {
  char *p = BB;
  for (int j = 0; j < nk; j++) {
    *p++ = 1;
    p = PS(p, ids_key(j));
    p = P(p, ids_reply, 8 + IDS_BYTES);
  }
  sendall(&C[0], BB, p - BB);
  ids_state = IDS_SET;
}
// handle what has arrived; a rank's reply is the first `size` bytes of ids_reply or, of one byte, 0
static int ids_read(size_t size, int timeout) {
  int done = 0, k = epoll_wait(ep, EV, NEV, timeout);
  if (k == 0 && timeout) {
    errno = ETIMEDOUT;
    die("ids stall");
  }
  for (int j = 0; j < k; j++) {
    conn *c = &C[EV[j].data.u32];
    if (!(EV[j].events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
      continue;
    ssize_t n;
    do {
      n = receive(c, "recv ids");
      if (n < 0)
        break;
      if ((size_t)n > c->rem || memcmp(RB, size == 1 ? "" : ids_reply + (size - c->rem), n)) {
        errno = EPROTO;
        die("ids reply");
      }
      c->rem -= n;
      done += c->rem == 0;
    } while ((size_t)n == RBN);
  }
  return done;
}
// wait until all threads of the server sleep, and return since when: a server that is busy, or waits for a core, is
// runnable
static uint64_t wait_quiet() {
  uint64_t since = now();
  if (!srvpid) {
    usleep(500000);
    return since;
  }
  for (int asleep = 0; asleep < 5;) {
    usleep(5000);
    if (!asleep)
      since = now();
    char p[320];
    snprintf(p, sizeof p, "/proc/%d/task", srvpid);
    DIR *d = opendir(p);
    struct dirent *e;
    asleep++;
    while (d && (e = readdir(d))) {
      if (e->d_name[0] == '.')
        continue;
      snprintf(p, sizeof p, "/proc/%d/task/%s/stat", srvpid, e->d_name);
      FILE *f = fopen(p, "r");
      char s = 'S';
      if (f) {
        if (fscanf(f, "%*d (%*[^)]) %c", &s) != 1)
          s = 'S';
        fclose(f);
      }
      if (s == 'R')
        asleep = 0;
    }
    if (d)
      closedir(d);
  }
  return since;
}
static void do_ids(const char *mode, int op, size_t size) {
  int done = 0, ranks = N - 1, parks = !strcmp(mode, "park"), wakes = !strcmp(mode, "wake");
  if (ranks < 1 || wakes != (ids_state == IDS_PARKED)) {
    errno = EINVAL;
    die(ranks < 1 ? "needs -n 2" : "wake follows park, and nothing else does");
  }
  if (parks)
    ids_generation++;
  else if (ids_state == IDS_NEW)
    ids_set();
  wait_quiet();
  uint64_t T0 = now(), c0 = srvcpu(), m0 = mycpu();
  long r0 = srvrss();
  size_t n = ids_request(op);
  if (wakes)
    ids_set();
  else
    for (int i = 1; i < N; i++) {
      C[i].rem = size;
      sendall(&C[i], BB, n);
      if (i % 64 == 0)
        done += ids_read(size, 0);
    }
  if (parks)
    ids_state = IDS_PARKED;
  else
    while (done < ranks)
      done += ids_read(size, 30000);
  uint64_t T1 = now(), quiet = wait_quiet();
  if (parks) {
    T1 = quiet;
    if (done || ids_read(size, 0)) {
      errno = EPROTO;
      die("reply to a rank that has to wait");
    }
  }
  printf("{\"tag\":\"%s\",\"mode\":\"%s\",\"n\":%d,\"keys\":%d,\"wall_ms\":%.2f,\"srv_cpu_us_per_rank\":%.2f,"
         "\"lg_cpu_us_per_rank\":%.2f,\"rss_per_rank\":%.0f}\n",
         tag, mode, ranks, nk, (T1 - T0) / 1e6, (srvcpu() - c0) / 1e3 / ranks, (mycpu() - m0) / 1e3 / ranks,
         (double)(srvrss() - r0) / ranks);
  fflush(stdout);
}
// ---- play: ranks 1 to N of a job send what a script says (bench/scale/start.py writes it): u32 ranks per root,
// replies, actions; for each reply u32 length, length if known, bytes; for each action u32 who, size of a group, ranks in
// such groups, number of its reply, length, fields, then u32 offset and kind of each field, and the request
enum { WHO_ALL, WHO_ROOTS, WHO_OTHERS, WHO_FIRST };
enum { FIELD_GROUP, FIELD_MEMBER, FIELD_ROOT };
typedef struct {
  const char *b;
  uint32_t n, known;
} reply;
typedef struct {
  uint32_t who, size, ranks, n, nf;
  const reply *rep;
  const char *f, *b;
} action;
static const char *script_path = "";
static double arrival = 0;
static reply *REP;
static action *ACT;
static uint32_t nact, per_root, *act_at;
static uint64_t waiting = 0, most_waiting = 0, requests = 0;
static int played = 0;
static uint32_t U32(const char **p) {
  uint32_t v;
  memcpy(&v, *p, 4);
  *p += 4;
  return v;
}
static void load_script() {
  FILE *f = fopen(script_path, "rb");
  if (!f)
    die(script_path);
  fseek(f, 0, SEEK_END);
  long n = ftell(f);
  rewind(f);
  char *b = malloc(n + 1);
  if (fread(b, 1, n, f) != (size_t)n)
    die(script_path);
  fclose(f);
  const char *p = b;
  per_root = U32(&p);
  uint32_t nrep = U32(&p);
  nact = U32(&p);
  REP = calloc(nrep + 1, sizeof *REP);
  ACT = calloc(nact + 1, sizeof *ACT);
  for (uint32_t i = 0; i < nrep; i++) {
    REP[i].n = U32(&p);
    REP[i].known = U32(&p);
    REP[i].b = p;
    p += REP[i].known;
  }
  uint32_t longest = 0;
  for (uint32_t i = 0; i < nact; i++) {
    action *a = &ACT[i];
    a->who = U32(&p);
    a->size = U32(&p);
    a->ranks = U32(&p);
    a->rep = &REP[U32(&p)];
    a->n = U32(&p);
    a->nf = U32(&p);
    a->f = p;
    p += 8 * a->nf;
    a->b = p;
    p += a->n;
    if (a->n > longest)
      longest = a->n;
  }
  if (longest > 1 << 22)
    BB = realloc(BB, longest);
}
static int sends(const action *a, uint32_t rank) {
  uint32_t member = rank % a->size;
  if (rank >= a->ranks)
    return 0;
  if (a->who == WHO_ALL)
    return 1;
  if (a->who == WHO_FIRST)
    return member == 0;
  return (member % per_root == 0) == (a->who == WHO_ROOTS);
}
// send a rank's next requests, up to one that has a reply
static void play_on(conn *c, uint32_t i) {
  uint32_t rank = i + 1;
  for (; act_at[i] < nact; act_at[i]++) {
    const action *a = &ACT[act_at[i]];
    if (!sends(a, rank))
      continue;
    const char *b = a->b, *f = a->f;
    if (a->nf) {
      b = memcpy(BB, a->b, a->n);
      for (uint32_t j = 0; j < a->nf; j++) {
        uint32_t at = U32(&f), kind = U32(&f), v = rank % a->size;
        char digits[16];
        if (kind == FIELD_GROUP)
          v = rank / a->size;
        else if (kind == FIELD_ROOT)
          v /= per_root;
        snprintf(digits, sizeof digits, "%08u", v);
        memcpy(BB + at, digits, 8);
      }
    }
    requests++;
    c->rem = a->rep->n;
    if (c->rem && *a->b == 6 && ++waiting > most_waiting)
      most_waiting = waiting;
    sendall(c, b, a->n);
    if (c->rem)
      return;
  }
  played++;
}
static void play_read(conn *c, uint32_t i) {
  ssize_t n;
  do {
    n = receive(c, "recv play");
    if (n < 0)
      return;
    const action *a = &ACT[act_at[i]];
    const reply *rep = a->rep;
    if ((size_t)n > c->rem || (rep->known && memcmp(RB, rep->b + (rep->n - c->rem), n))) {
      errno = EPROTO;
      die("wrong reply");
    }
    c->rem -= n;
    if (c->rem == 0) {
      if (*a->b == 6)
        waiting--;
      if (act_at[i] == 0)
        nready++;
      act_at[i]++;
      play_on(c, i);
    }
  } while ((size_t)n == RBN);
}
static uint64_t own_waited() {
  unsigned long long ran = 0, waited = 0;
  FILE *f = fopen("/proc/self/schedstat", "r");
  if (f) {
    if (fscanf(f, "%llu %llu", &ran, &waited) != 2)
      waited = 0;
    fclose(f);
  }
  return waited;
}
static void do_play() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  load_script();
  act_at = calloc(N, sizeof *act_at);
  int *order = calloc(N, sizeof *order);
  for (int roots = 0, k = 0; roots < 2; roots++) // at once: roots last, so that all others wait for all of them
    for (int j = 0; j < N && k < N; j++) {
      int i = (uint64_t)j * 1000003 % N;
      if (arrival > 0 || ((i + 1) % per_root == 0) == roots)
        order[k++] = i;
    }
  per_source = 4096;
  uint64_t T0 = now(), m0 = mycpu(), w0 = own_waited();
  while (played < N) {
    int timeout = -1;
    for (int k = 0; k < 64 && nstarted < N && nstarted - nready < conc; k++) {
      int64_t early = T0 + (int64_t)(arrival * 1e9 * nstarted / (N > 1 ? N - 1 : 1)) - now();
      if (early > 0) {
        timeout = 1 + early / 1000000;
        break;
      }
      timeout = 0;
      start_conn(order[nstarted]);
    }
    int k = epoll_wait(ep, EV, NEV, timeout);
    if (k < 0 && errno != EINTR)
      die("epoll_wait");
    for (int j = 0; j < k; j++) {
      uint32_t i = EV[j].data.u32;
      conn *c = &C[i];
      if (c->st == ST_CONN && EV[j].events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) {
        check_connected(c);
        c->st = ST_RUN;
        play_on(c, i);
      }
      if (c->st == ST_RUN && EV[j].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        play_read(c, i);
    }
  }
  printf("{\"mode\":\"play\",\"n\":%d,\"began\":%.6f,\"ended\":%.6f,\"cpu\":%.6f,\"waited\":%.6f,\"requests\":%llu,"
         "\"parked\":%llu}\n",
         N, T0 / 1e9, now() / 1e9, (mycpu() - m0) / 1e9, (own_waited() - w0) / 1e9, (unsigned long long)requests,
         (unsigned long long)most_waiting);
  fflush(stdout);
}
int main(int ac, char **av) {
  char *mode = "init";
  int o;
  while ((o = getopt(ac, av, "h:p:n:c:m:d:t:w:r:k:b:P:T:Sg:f:A:")) != -1)
    switch (o) {
    case 'h':
      strncpy(host, optarg, 63);
      break;
    case 'p':
      port = atoi(optarg);
      break;
    case 'n':
      N = atoi(optarg);
      break;
    case 'c':
      conc = atoi(optarg);
      break;
    case 'm':
      mode = optarg;
      break;
    case 'd':
      depth = atoi(optarg);
      break;
    case 't':
      secs = atof(optarg);
      break;
    case 'w':
      warm = atof(optarg);
      break;
    case 'r':
      rounds = atoi(optarg);
      break;
    case 'k':
      nk = atoi(optarg);
      break;
    case 'b':
      bsz = atol(optarg);
      break;
    case 'P':
      srvpid = atoi(optarg);
      break;
    case 'g':
      gap = atoi(optarg);
      break;
    case 'S':
      sigstop = 1;
      break;
    case 'T':
      tag = optarg;
      break;
    case 'f':
      script_path = optarg;
      break;
    case 'A':
      arrival = atof(optarg);
      break;
    default:
      return 2;
    }
  struct rlimit rl;
  getrlimit(RLIMIT_NOFILE, &rl);
  rl.rlim_cur = rl.rlim_max;
  setrlimit(RLIMIT_NOFILE, &rl);
  if (conc <= 0)
    conc = N;
  C = calloc(N, sizeof(conn));
  tconn = calloc(N, 8);
  EV = calloc(NEV, sizeof *EV);
  RB = malloc(RBN);
  BB = malloc((1 << 22) + bsz * 2);
  bigv = malloc(bsz);
  memset(bigv, 'b', bsz);
  memset(val100, 'v', 100);
  ids_reply = malloc(nk * (8 + IDS_BYTES) + 1);
  for (char *p = ids_reply; p < ids_reply + nk * (8 + IDS_BYTES); p += 8 + IDS_BYTES)
    memset(P64(p, IDS_BYTES), 'i', IDS_BYTES);
  ep = epoll_create1(0);
  char *mm = strdup(mode);
  int seeded = 0, inited = 0;
  for (char *m = strtok(mm, ","); m; m = strtok(NULL, ",")) {
    if (!strcmp(m, "play")) {
      do_play();
      inited = 1;
      continue;
    }
    if (!inited) {
      do_init(strncmp(m, "init", 4) != 0);
      inited = 1;
      if (!strncmp(m, "init", 4))
        continue;
    }
    if (!strcmp(m, "barrier"))
      do_barrier();
    else if (!strcmp(m, "barrier18"))
      do_barrier_opcode();
    else if (!strcmp(m, "park") || !strcmp(m, "wake") || !strcmp(m, "readywait"))
      do_ids(m, 6, 1);
    else if (!strcmp(m, "mget128"))
      do_ids(m, 10, nk * (8 + IDS_BYTES));
    else if (!strcmp(m, "hold")) {
      sleep(1000);
    } else {
      int op = -1, d0 = depth;
      char *cl = strchr(m, '@');
      if (cl) {
        *cl = 0;
        depth = atoi(cl + 1);
      }
      for (int k = 0; k < 10; k++)
        if (!strcmp(m, OPN[k]))
          op = k;
      if (op < 0) {
        fprintf(stderr, "bad mode %s\n", m);
        return 2;
      }
      if (!seeded) {
        seed();
        seeded = 1;
      }
      do_tput(op);
      depth = d0;
    }
  }
  // RST close so ports do not sit in TIME_WAIT
  struct linger lg = {1, 0};
  for (int i = 0; i < N; i++) {
    setsockopt(C[i].fd, SOL_SOCKET, SO_LINGER, &lg, sizeof lg);
    close(C[i].fd);
  }
  return 0;
}
