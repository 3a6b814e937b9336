// attnctl is the operator's hand on a running attnd: it sends one request over the daemon's
// sockets, prints the answer, and says in its exit status how it went.
//
// Every command is a row of a table: its op, what follows it on the command line, and how its reply
// is printed.  Commands are tried on the administration socket first, where they concern every
// tenant; those that a plain client may also give go to the main socket when that one cannot be
// reached (no permission, tcp), and then concern the tenant "default".
#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/client/attnd.h"
#include "server/attnctl_text.h"

enum { EXIT_ERROR = 1, EXIT_USAGE = 2, EXIT_NOT_READY = 3, EXIT_NO_DAEMON = 4 };
enum { URL_BYTES = 512, MAX_TIMEOUT_MS = 24 * 3600 * 1000 };

static const char admin_suffix[] = ".admin";

static const char usage[] =
    "usage: attnctl [-s PATH|URL] [-a PATH|URL] [--json] [--timeout MS] COMMAND\n"
    "\n"
    "  status               state, blocks, scheduler, tenants\n"
    "  models               open models\n"
    "  sequences            sequences and what they hold\n"
    "  sessions             connected clients\n"
    "  drain [MS]           refuse new work, give running work MS, then stop\n"
    "  config get [KEY]     one value of the configuration, or all\n"
    "  config set KEY VALUE change a value until the next start of attnd\n"
    "  ping                 is the daemon ready?\n"
    "\n"
    "  -s, --socket   the daemon's socket ($ATTND_SOCKET, else ipc:///run/attnd/attnd.sock)\n"
    "  -a, --admin    its administration socket (else the socket's path with .admin appended)\n"
    "  -j, --json     print the daemon's reply as it is\n"
    "  -t, --timeout  of connecting and of the reply, in ms (5000)\n"
    "  -h, --help, --version\n"
    "\n"
    "exit status: 0 ok, 1 error, 2 usage, 3 the daemon is not ready, 4 no connection\n";

typedef enum ctl_where {
    ANY_SOCKET,  // administration first, else the main one
    ADMIN_ONLY,  // every tenant's, or changes something
    MAIN_SOCKET, // what a client sees
} ctl_where;

typedef struct ctl_command {
    const char *words; // "config get"
    const char *op;
    int min_args, max_args;
    const char *keys[2]; // JSON keys of the arguments
    bool is_number;      // the arguments are numbers
    ctl_where where;
    void (*print)(const cJSON *doc, FILE *out);
} ctl_command;

static const ctl_command commands[] = {
    {"status", "stats", 0, 0, {NULL}, false, ANY_SOCKET, attnctl_print_status},
    {"models", "model_list", 0, 0, {NULL}, false, ANY_SOCKET, attnctl_print_models},
    {"sequences", "seq_list", 0, 0, {NULL}, false, ANY_SOCKET, attnctl_print_sequences},
    {"sessions", "session_list", 0, 0, {NULL}, false, ADMIN_ONLY, attnctl_print_sessions},
    {"drain", "drain", 0, 1, {"timeout_ms"}, true, ADMIN_ONLY, attnctl_print_drain},
    {"config get", "config_get", 0, 1, {"key"}, false, ADMIN_ONLY, attnctl_print_config},
    {"config set", "config_set", 2, 2, {"key", "value"}, false, ADMIN_ONLY, attnctl_print_config},
    {"ping", "stats", 0, 0, {NULL}, false, MAIN_SOCKET, attnctl_print_ping},
};

typedef struct ctl {
    char url[URL_BYTES], admin_url[URL_BYTES]; // admin_url "" = there is none
    bool json;
    int32_t timeout_ms;
    const ctl_command *command;
    char **args;
    int num_args;
} ctl;

static int usage_error(const char *what, const char *which) {
    fprintf(stderr, "attnctl: %s%s (attnctl --help lists commands and options)\n", what, which);
    return EXIT_USAGE;
}

// ---- command line

static bool parse_ms(const char *text, int32_t *out) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (end == text || *end || errno || value < 0 || value > MAX_TIMEOUT_MS) {
        return false;
    }
    *out = (int32_t)value;
    return true;
}

// set_url makes a URL of a path or URL; false when it is too long.
static bool set_url(char out[URL_BYTES], const char *where, const char *suffix) {
    const char *scheme = strstr(where, "://") ? "" : "ipc://";
    int n = snprintf(out, URL_BYTES, "%s%s%s", scheme, where, suffix);
    return n > 0 && n < URL_BYTES;
}

static bool has_suffix(const char *s, const char *suffix) {
    size_t len = strlen(s), suffix_len = strlen(suffix);
    return len >= suffix_len && strcmp(s + len - suffix_len, suffix) == 0;
}

// set_urls finds the administration socket beside the main one; whoever names the former as the
// socket means both.
static bool set_urls(ctl *c, const char *socket, const char *admin) {
    if (!socket) {
        socket = getenv("ATTND_SOCKET");
    }
    if (!socket || !*socket) {
        socket = "ipc:///run/attnd/attnd.sock";
    }
    if (!set_url(c->url, socket, "")) {
        return false;
    }
    if (admin) {
        return set_url(c->admin_url, admin, "");
    }
    if (strncmp(c->url, "ipc://", 6) != 0) {
        return true;
    }
    return set_url(c->admin_url, socket, has_suffix(socket, admin_suffix) ? "" : admin_suffix);
}

// take_word returns what follows the word and a space in words, NULL when it is not the next word.
static const char *take_word(const char *words, const char *word) {
    size_t len = strlen(word);
    if (strncmp(words, word, len) != 0 || (words[len] != ' ' && words[len] != '\0')) {
        return NULL;
    }
    return words[len] ? words + len + 1 : words + len;
}

// find_command takes the command off the arguments.
static const ctl_command *find_command(ctl *c) {
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        const char *rest = commands[i].words;
        int num = 0;
        while (*rest && num < c->num_args && (rest = take_word(rest, c->args[num]))) {
            num++;
        }
        if (rest && !*rest) {
            c->args += num;
            c->num_args -= num;
            return &commands[i];
        }
    }
    return NULL;
}

static int no_command(const ctl *c) {
    if (c->num_args == 0) {
        return usage_error("which command?", "");
    }
    if (strcmp(c->args[0], "config") == 0) {
        return usage_error("config get or config set?", "");
    }
    return usage_error("no such command: ", c->args[0]);
}

// parse returns 0, or the exit status.
static int parse(ctl *c, int argc, char **argv) {
    static const struct option options[] = {{"socket", required_argument, NULL, 's'},
                                            {"admin", required_argument, NULL, 'a'},
                                            {"json", no_argument, NULL, 'j'},
                                            {"timeout", required_argument, NULL, 't'},
                                            {"help", no_argument, NULL, 'h'},
                                            {"version", no_argument, NULL, 'v'},
                                            {NULL, 0, NULL, 0}};
    const char *socket = NULL, *admin = NULL;
    int opt;
    opterr = 0;
    while ((opt = getopt_long(argc, argv, "s:a:jt:h", options, NULL)) != -1) {
        switch (opt) {
        case 's':
            socket = optarg;
            break;
        case 'a':
            admin = optarg;
            break;
        case 'j':
            c->json = true;
            break;
        case 't':
            if (!parse_ms(optarg, &c->timeout_ms) || c->timeout_ms == 0) {
                return usage_error("not a number of milliseconds: ", optarg);
            }
            break;
        case 'h':
            fputs(usage, stdout);
            exit(EXIT_SUCCESS);
        case 'v':
            puts("attnctl " ATTND_VERSION);
            exit(EXIT_SUCCESS);
        default:
            return usage_error(
                "unknown, or its value is missing; -- goes before a value with a -: ",
                argv[optind - 1]);
        }
    }
    if (!set_urls(c, socket, admin)) {
        return usage_error("the socket's name is too long", "");
    }
    c->args = argv + optind;
    c->num_args = argc - optind;
    c->command = find_command(c);
    if (!c->command) {
        return no_command(c);
    }
    if (c->num_args < c->command->min_args || c->num_args > c->command->max_args) {
        return usage_error("wrong number of arguments: ", c->command->words);
    }
    return 0;
}

// make_body returns the request's JSON, NULL when the command takes no arguments; *status is the
// exit status of arguments that are none.
static char *make_body(const ctl *c, int *status) {
    *status = 0;
    if (c->command->max_args == 0) {
        return NULL;
    }
    cJSON *doc = cJSON_CreateObject();
    for (int i = 0; i < c->num_args; i++) {
        int32_t ms;
        if (!c->command->is_number) {
            cJSON_AddStringToObject(doc, c->command->keys[i], c->args[i]);
        } else if (parse_ms(c->args[i], &ms)) {
            cJSON_AddNumberToObject(doc, c->command->keys[i], ms);
        } else {
            *status = usage_error("not a number of milliseconds: ", c->args[i]);
        }
    }
    char *body = cJSON_PrintUnformatted(doc);
    cJSON_Delete(doc);
    return body;
}

// ---- the request

// ask_at makes the request at one socket; *connected says how far it came.
static attnd_err ask_at(const ctl *c, const char *url, const char *body, char **reply,
                        bool *connected, attnd_errinfo *info) {
    attnd_connect_opts opts = {.client_name = "attnctl", .timeout_ms = c->timeout_ms};
    attnd_client *client;
    attnd_err err = attnd_connect(&client, url, &opts, info);
    *connected = err != ATTND_ECONN && err != ATTND_ETIMEDOUT;
    if (err) {
        return err;
    }
    err = attnd_admin(client, c->command->op, body, reply, info);
    attnd_close(client);
    return err;
}

static attnd_err ask(const ctl *c, const char *body, char **reply, bool *connected,
                     attnd_errinfo *info) {
    ctl_where where = c->command->where;
    *connected = false;
    if (where == ADMIN_ONLY && !c->admin_url[0]) {
        return attnd_fail(info, ATTND_EPERM, "", "%s needs the administration socket: --admin",
                          c->command->words);
    }
    if (where != MAIN_SOCKET && c->admin_url[0]) {
        attnd_err err = ask_at(c, c->admin_url, body, reply, connected, info);
        if (*connected || where == ADMIN_ONLY) {
            return err;
        }
    }
    return ask_at(c, c->url, body, reply, connected, info);
}

// print_reply returns the exit status.
static int print_reply(const ctl *c, const char *reply) {
    cJSON *doc = cJSON_Parse(reply);
    if (!doc) {
        fprintf(stderr, "attnctl: the daemon's reply is no JSON\n");
        return EXIT_ERROR;
    }
    if (c->json) {
        puts(reply);
    } else {
        c->command->print(doc, stdout);
    }
    const char *state = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(doc, "state"));
    bool ready = c->command->where != MAIN_SOCKET || (state && strcmp(state, "ready") == 0);
    cJSON_Delete(doc);
    if (fflush(stdout) != 0) {
        fprintf(stderr, "attnctl: %s\n", strerror(errno));
        return EXIT_ERROR;
    }
    return ready ? EXIT_SUCCESS : EXIT_NOT_READY;
}

static int report(attnd_err err, bool connected, const attnd_errinfo *info) {
    fprintf(stderr, "attnctl: %s: %s", attnd_errname(err),
            info->text[0] ? info->text : attnd_strerror(err));
    if (info->field[0]) {
        fprintf(stderr, " (%s)", info->field);
    }
    fputc('\n', stderr);
    if (err == ATTND_ESHUTDOWN) {
        return EXIT_NOT_READY;
    }
    bool no_daemon = !connected && (err == ATTND_ECONN || err == ATTND_ETIMEDOUT);
    return no_daemon ? EXIT_NO_DAEMON : EXIT_ERROR;
}

int main(int argc, char **argv) {
    ctl c = {.timeout_ms = 5000};
    int status = parse(&c, argc, argv);
    if (status) {
        return status;
    }
    char *body = make_body(&c, &status);
    if (status) {
        cJSON_free(body);
        return status;
    }
    char *reply = NULL;
    bool connected;
    attnd_errinfo info = {.code = ATTND_OK};
    attnd_err err = ask(&c, body, &reply, &connected, &info);
    cJSON_free(body);
    if (err) {
        return report(err, connected, &info);
    }
    status = print_reply(&c, reply);
    attnd_free(reply);
    return status;
}
