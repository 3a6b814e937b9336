// deploy/attnd.conf is the configuration reference: it must have the head below, and then say what
// the table of keys says, key by key, at the defaults.  `test_attnd_conf --print` writes what it
// should be.
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/srv_conf.h"
#include "tests/check_main.h"

enum { COLUMNS = 100, FILE_BYTES = 65536 };

// comment writes text as a comment, broken between words.
static void comment(FILE *out, const char *text) {
    size_t column = 0;
    while (*text) {
        size_t blanks = strspn(text, " "), len = strcspn(text + blanks, " ");
        if (column > 0 && column + blanks + len > COLUMNS) {
            fputc('\n', out);
            column = 0;
        }
        column +=
            (size_t)fprintf(out, "%*s", column == 0 ? 2 : (int)blanks, column == 0 ? "# " : "");
        column += (size_t)fprintf(out, "%.*s", (int)len, text + blanks);
        text += blanks + len;
    }
    fputc('\n', out);
}

// value writes a number in the largest unit that divides it.
static void value(char out[32], srv_conf_type type, uint64_t n) {
    if (type == SRV_CONF_SIZE && n > 0) {
        static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
        int unit = 0;
        while (unit < 3 && n % 1024 == 0) {
            n /= 1024;
            unit++;
        }
        snprintf(out, 32, "%" PRIu64 "%s", n, units[unit]);
    } else if (type == SRV_CONF_TIME) {
        bool whole = n % 1000 == 0;
        snprintf(out, 32, "%" PRIu64 "%s", whole ? n / 1000 : n, whole ? "s" : "ms");
    } else {
        snprintf(out, 32, type == SRV_CONF_MODE ? "%04" PRIo64 : "%" PRIu64, n);
    }
}

// print_limits writes the line that says what a value is, and when a change takes effect.
static void print_limits(FILE *out, const srv_conf_key *key) {
    char line[256], min[32], max[32];
    static const char *const names[] = {[SRV_CONF_COUNT] = "Count",
                                        [SRV_CONF_SIZE] = "Size",
                                        [SRV_CONF_TIME] = "Time",
                                        [SRV_CONF_MODE] = "Octal mode"};
    const char *when = key->reloadable ? "reload" : "start";
    value(min, key->type, key->min);
    value(max, key->type, key->max);
    if (key->type == SRV_CONF_TEXT || key->type == SRV_CONF_UIDS) {
        snprintf(line, sizeof(line), "Text, at most %d bytes; %s.", SRV_CONF_TEXT_BYTES - 1, when);
    } else if (key->type == SRV_CONF_BOOL) {
        snprintf(line, sizeof(line), "on or off; %s.", when);
    } else if (key->type == SRV_CONF_CHOICE) {
        snprintf(line, sizeof(line), "One of: %s; %s.", key->choices, when);
    } else {
        snprintf(line, sizeof(line), "%s, %s to %s; %s.", names[key->type], min, max, when);
    }
    comment(out, line);
}

static const char head[] =
    "# Configuration of attnd: every key with its default, commented out.\n"
    "#\n"
    "# INI: [section], then KEY = VALUE a line.  A comment has a line of its own, which begins "
    "with #\n"
    "# or ;.  Behind a value, ; after a blank begins a comment too, # does not: it belongs to the\n"
    "# value.  A value may go on in lines that begin with a blank.  A line has at most 198 bytes.\n"
    "#\n"
    "# Sizes are whole numbers of B, KiB, MiB or GiB (none: bytes), times of s or ms (none: ms).\n"
    "#\n"
    "# start: a change takes effect when attnd starts; reload: on SIGHUP (systemctl reload attnd), "
    "or\n"
    "# at once, until the next start, by attnctl config set SECTION.KEY VALUE.\n"
    "#\n"
    "# attnd --set SECTION.KEY=VALUE overrides this file.  attnd --config FILE --check-config "
    "says\n"
    "# what is wrong in it.\n";

static void print_reference(FILE *out) {
    const char *section = "";
    fputs(head, out);
    for (const srv_conf_key *key = srv_conf_keys; key->section; key++) {
        if (strcmp(section, key->section) != 0) {
            section = key->section;
            fprintf(out, "\n[%s%s]\n", section, strcmp(section, "tenant") ? "" : " default");
        }
        fputc('\n', out);
        comment(out, key->doc);
        print_limits(out, key);
        fprintf(out, "#%s =%s%s\n", key->name, key->fallback[0] ? " " : "", key->fallback);
    }
}

static void read_file(char text[FILE_BYTES]) {
    FILE *file = fopen(ATTND_CONF, "re");
    ck_assert_ptr_nonnull(file);
    size_t len = fread(text, 1, FILE_BYTES - 1, file);
    text[len] = '\0';
    fclose(file);
}

START_TEST(reference_says_what_the_table_says) {
    static char text[FILE_BYTES], expected[FILE_BYTES];
    read_file(text);
    FILE *out = fmemopen(expected, sizeof(expected), "w");
    print_reference(out);
    fclose(out);
    const char *body = text;
    size_t same = 0, line = 0;
    for (; body[same] && body[same] == expected[same]; same++) {
        line = body[same] == '\n' ? same + 1 : line;
    }
    ck_assert_msg(body[same] == expected[same], "the file says\n%.300s\nand should say\n%.300s",
                  body + line, expected + line);
}
END_TEST

// load_is_default loads a file and compares all values with the defaults.
static void load_is_default(const char *path) {
    static srv_conf conf, defaults;
    srv_conf_errors errors = {0};
    srv_conf_init(&conf);
    srv_conf_init(&defaults);
    ck_assert_msg(srv_conf_load(&conf, path, &errors) == ATTND_OK, "%s", errors.text[0]);
    ATTND_CK_OK(srv_conf_check(&conf, &errors));
    for (const srv_conf_key *key = srv_conf_keys; key->section; key++) {
        char name[128], a[SRV_CONF_TEXT_BYTES], b[SRV_CONF_TEXT_BYTES];
        snprintf(name, sizeof(name), "%s%s.%s", key->section,
                 strcmp(key->section, "tenant") ? "" : " default", key->name);
        ATTND_CK_OK(srv_conf_get(&conf, name, a, NULL));
        ATTND_CK_OK(srv_conf_get(&defaults, name, b, NULL));
        ck_assert_str_eq(a, b);
    }
}

// load_text loads a configuration of one text; value is log_level then.
static attnd_err load_text(const char *text, const char *key, char *value) {
    static srv_conf conf;
    srv_conf_errors errors = {0};
    char path[] = "/tmp/attnd_conf_XXXXXX";
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    FILE *out = fdopen(fd, "w");
    fputs(text, out);
    fclose(out);
    srv_conf_init(&conf);
    attnd_err err = srv_conf_load(&conf, path, &errors);
    unlink(path);
    return err ? err : srv_conf_get(&conf, key, value, NULL);
}

START_TEST(head_is_true_of_comments_and_units) {
    char value[SRV_CONF_TEXT_BYTES];
    ATTND_CK_OK(load_text("; a\n# b\n[server]\nlog_level = warn ; c\n", "server.log_level", value));
    ck_assert_str_eq(value, "warn");
    ck_assert_int_ne(load_text("[server]\nlog_level = warn # c\n", "server.log_level", value), 0);
    ATTND_CK_OK(load_text("[cache]\nmemory = 1073741824\n", "cache.memory", value));
    ck_assert_str_eq(value, "1GiB");
    ATTND_CK_OK(load_text("[server]\ndrain_timeout = 3000\n", "server.drain_timeout", value));
    ck_assert_str_eq(value, "3s");
}
END_TEST

START_TEST(reference_is_a_configuration_with_nothing_set) {
    load_is_default(ATTND_CONF);
}
END_TEST

START_TEST(reference_with_all_keys_set_is_the_default) {
    static char text[FILE_BYTES];
    read_file(text);
    char path[] = "/tmp/attnd_conf_XXXXXX";
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    FILE *out = fdopen(fd, "w");
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        bool is_key = line[0] == '#' && islower((unsigned char)line[1]); // comments have a space
        fprintf(out, "%s\n", line + is_key);
    }
    fclose(out);
    load_is_default(path);
    unlink(path);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attnd_conf");
    TCase *t = tcase_create("reference");
    tcase_add_test(t, reference_says_what_the_table_says);
    tcase_add_test(t, head_is_true_of_comments_and_units);
    tcase_add_test(t, reference_is_a_configuration_with_nothing_set);
    tcase_add_test(t, reference_with_all_keys_set_is_the_default);
    suite_add_tcase(s, t);
    return s;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "--print") == 0) {
        print_reference(stdout);
        return EXIT_SUCCESS;
    }
    SRunner *runner = srunner_create(suite());
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
