// The intrusive list: order, removal while walking, a node knows whether it is linked.
#include "proto/list.h"

#include "tests/check_main.h"

typedef struct item {
    int value;
    list_node node;
} item;

static int walk(list_node *head, int *out) {
    int n = 0;
    LIST_FOREACH (head, node) {
        out[n++] = LIST_ENTRY(node, item, node)->value;
    }
    return n;
}

START_TEST(list_is_empty_after_init) {
    list_node head;
    list_init(&head);
    ck_assert(list_empty(&head));
    ck_assert_ptr_null(list_first(&head));
    int out[1];
    ck_assert_int_eq(walk(&head, out), 0);
}
END_TEST

START_TEST(list_append_keeps_order) {
    list_node head;
    list_init(&head);
    item items[3] = {{.value = 1}, {.value = 2}, {.value = 3}};
    for (int i = 0; i < 3; i++) {
        ck_assert(!list_linked(&items[i].node));
        list_append(&head, &items[i].node);
        ck_assert(list_linked(&items[i].node));
    }
    int out[3];
    ck_assert_int_eq(walk(&head, out), 3);
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(out[i], i + 1);
    }
    ck_assert_ptr_eq(list_first(&head), &items[0].node);
}
END_TEST

START_TEST(list_insert_before_links_in_front_of_a_node) {
    list_node head;
    list_init(&head);
    item a = {.value = 1}, b = {.value = 2}, c = {.value = 3};
    list_append(&head, &a.node);
    list_append(&head, &c.node);
    list_insert_before(&c.node, &b.node);
    int out[3];
    ck_assert_int_eq(walk(&head, out), 3);
    ck_assert_int_eq(out[1], 2);
}
END_TEST

START_TEST(list_foreach_survives_removal_of_the_current_node) {
    list_node head;
    list_init(&head);
    item items[5];
    for (int i = 0; i < 5; i++) {
        items[i].value = i;
        list_append(&head, &items[i].node);
    }
    LIST_FOREACH (&head, node) {
        if (LIST_ENTRY(node, item, node)->value % 2 == 0) {
            list_remove(node);
            ck_assert(!list_linked(node));
        }
    }
    int out[5];
    ck_assert_int_eq(walk(&head, out), 2);
    ck_assert_int_eq(out[0], 1);
    ck_assert_int_eq(out[1], 3);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("list");
    TCase *tc = tcase_create("list");
    tcase_add_test(tc, list_is_empty_after_init);
    tcase_add_test(tc, list_append_keeps_order);
    tcase_add_test(tc, list_insert_before_links_in_front_of_a_node);
    tcase_add_test(tc, list_foreach_survives_removal_of_the_current_node);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
