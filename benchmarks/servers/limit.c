// SPDX-License-Identifier: Apache-2.0
// What the system alone costs: sends the body of a request back, and reads no header. A request has to come in one piece
// that is shorter than 4 KiB.
#define _GNU_SOURCE
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static void answer(int client) {
    char asked[4096], told[4200];
    ssize_t size = recv(client, asked, sizeof asked, 0);
    char *body = size > 0 ? memmem(asked, (size_t)size, "\r\n\r\n", 4) : NULL;
    if (!body) {
        close(client);
        return;
    }
    body += 4;
    int length = (int)(asked + size - body);
    const char *head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n";
    int start = snprintf(told, sizeof told, head, length);
    memcpy(told + start, body, (size_t)length);
    send(client, told, (size_t)(start + length), MSG_NOSIGNAL);
}

int main(int count, char **arguments) {
    int door = socket(AF_INET, SOCK_STREAM, 0), events = epoll_create1(0), yes = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(count > 1 ? atoi(arguments[1]) : 0)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(door, (struct sockaddr *)&address, sizeof address) || listen(door, 4096)) return perror("limit"), 1;
    struct epoll_event wanted = {.events = EPOLLIN, .data.fd = door}, ready[256];
    epoll_ctl(events, EPOLL_CTL_ADD, door, &wanted);
    for (;;) {
        int found = epoll_wait(events, ready, 256, -1);
        for (int at = 0; at < found; at++) {
            if (ready[at].data.fd != door) {
                answer(ready[at].data.fd);
                continue;
            }
            wanted.data.fd = accept(door, NULL, NULL);
            if (wanted.data.fd < 0) continue;
            setsockopt(wanted.data.fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
            epoll_ctl(events, EPOLL_CTL_ADD, wanted.data.fd, &wanted);
        }
    }
}
