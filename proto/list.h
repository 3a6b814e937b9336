// list is an intrusive doubly linked list: a node is embedded in what it links, the head is a node
// of its own.  Nothing is allocated.  Caller locks.
#ifndef ATTND_PROTO_LIST_H
#define ATTND_PROTO_LIST_H

#include <stdbool.h>
#include <stddef.h>

typedef struct list_node {
    struct list_node *prev, *next; // both NULL = in no list
} list_node;

// LIST_ENTRY returns the struct that embeds the node as its member.
#define LIST_ENTRY(node, type, member) ((type *)(void *)((char *)(node)-offsetof(type, member)))

// LIST_FOREACH walks a list; the current node may be removed.
#define LIST_FOREACH(head, node)                                                    \
    for (list_node *node = (head)->next, *node##_next = node->next; node != (head); \
         node = node##_next, node##_next = node->next)

static inline void list_init(list_node *head) {
    head->prev = head->next = head;
}

static inline bool list_empty(const list_node *head) {
    return head->next == head;
}

static inline bool list_linked(const list_node *node) {
    return node->next != NULL;
}

// list_insert_before links node before at; with at the head, that is at the end.
static inline void list_insert_before(list_node *at, list_node *node) {
    node->prev = at->prev;
    node->next = at;
    at->prev->next = node;
    at->prev = node;
}

static inline void list_append(list_node *head, list_node *node) {
    list_insert_before(head, node);
}

static inline void list_remove(list_node *node) {
    node->prev->next = node->next;
    node->next->prev = node->prev;
    node->prev = node->next = NULL;
}

// list_first returns the first node, NULL when the list is empty.
static inline list_node *list_first(const list_node *head) {
    return list_empty(head) ? NULL : head->next;
}

#endif
