#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/load/bench_trace.h"

static char path[] = "test_bench_trace.XXXXXX";
static bench_trace trace;
static attnd_errinfo info;

static void setup(void) {
    strcpy(path, "test_bench_trace.XXXXXX");
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    close(fd);
    trace = (bench_trace){0};
    memset(&info, 0, sizeof(info));
}

static void teardown(void) {
    bench_trace_free(&trace);
    unlink(path);
}

static attnd_err read_bytes(const char *text, size_t bytes, uint64_t max_rows) {
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(text, 1, bytes, f), bytes);
    fclose(f);
    return bench_trace_read(&trace, path, max_rows, &info);
}

static attnd_err read_text(const char *text) {
    return read_bytes(text, strlen(text), 0);
}

#define HEADER "TIMESTAMP,ContextTokens,GeneratedTokens\n"

START_TEST(azure_csv_is_read_as_published) {
    ATTND_CK_OK(read_text(HEADER "2023-11-16 18:15:46.6805900,374,44\n"
                                 "2023-11-16 18:15:50.9951690,396,109\n"
                                 "2023-11-17 00:00:00.0000000,14089,0")); // no newline at the end
    ck_assert_str_eq(trace.format, "azure");
    ck_assert_uint_eq(trace.num_rows, 3);
    ck_assert_uint_eq(trace.rows[0].input, 374);
    ck_assert_uint_eq(trace.rows[0].output, 44);
    ck_assert_uint_eq(trace.rows[0].time_us, 0);
    ck_assert_uint_eq(trace.rows[1].time_us, 4314579);      // 50.995169 - 46.680590
    ck_assert_uint_eq(trace.rows[2].time_us, 20653319410u); // 5:44:13.319410 later
    ck_assert_uint_eq(trace.rows[2].input, 14089);
    ck_assert_uint_eq(trace.rows[2].output, 0);
}
END_TEST

START_TEST(columns_zones_and_line_ends_may_vary) {
    ATTND_CK_OK(read_text("Model,GeneratedTokens,TIMESTAMP,ContextTokens\r\n"
                          "x, 7 ,2024-05-10 00:00:00.009930+00:00,11\r\n"
                          "\r\n"
                          "y,8,2024-05-10T01:00:00+01:00,12,extra\r\n"
                          "z,9,2024-05-09 23:59:59.5Z,13\r\n"));
    ck_assert_uint_eq(trace.num_rows, 3);
    ck_assert_uint_eq(trace.rows[0].input, 11);
    ck_assert_uint_eq(trace.rows[0].output, 7);
    ck_assert_uint_eq(trace.rows[0].time_us, 509930); // the earliest row is the last
    ck_assert_uint_eq(trace.rows[1].time_us, 500000);
    ck_assert_uint_eq(trace.rows[2].time_us, 0);
}
END_TEST

START_TEST(mooncake_json_lines_are_read_as_published) {
    ATTND_CK_OK(read_text("{\"timestamp\": 3000, \"input_length\": 6758, \"output_length\": 500, "
                          "\"hash_ids\": [0, 1, 2]}\n"
                          "{\"timestamp\": 3000.5, \"input_length\": 1, \"output_length\": 2, "
                          "\"hash_ids\": [], \"more\": {\"a\": null}}\n"
                          "{\"timestamp\": 3001, \"input_length\": 600, \"output_length\": 1, "
                          "\"hash_ids\": [0, 4294967295]}\n"));
    ck_assert_str_eq(trace.format, "mooncake");
    ck_assert_uint_eq(trace.num_rows, 3);
    ck_assert_uint_eq(trace.rows[0].input, 6758);
    ck_assert_uint_eq(trace.rows[0].output, 500);
    ck_assert_uint_eq(trace.rows[1].time_us, 500);
    const uint32_t ids[] = {0, 1, 2, 0, UINT32_MAX};
    ck_assert_uint_eq(trace.num_ids, 5);
    ck_assert_mem_eq(trace.ids, ids, sizeof(ids));
    ck_assert_uint_eq(trace.rows[0].num_ids, 3);
    ck_assert_uint_eq(trace.rows[1].num_ids, 0);
    ck_assert_uint_eq(trace.rows[2].num_ids, 2);
    ck_assert_uint_eq(trace.rows[2].first_id, 3);
}
END_TEST

START_TEST(only_the_first_rows_are_read) {
    const char text[] = HEADER "2023-11-16 18:15:46,1,2\n2023-11-16 18:15:47,3,4\ngarbage\n";
    ATTND_CK_OK(read_bytes(text, sizeof(text) - 1, 2));
    ck_assert_uint_eq(trace.num_rows, 2);
    bench_trace_free(&trace);
    ATTND_CK_ERR(read_bytes(text, sizeof(text) - 1, 3), ATTND_EINVAL);
}
END_TEST

// bad lines, and what their refusal says
static const struct {
    const char *text, *says;
} BAD[] = {
    {"a,b,c\n", ":1: neither JSON nor a CSV header with the column TIMESTAMP"},
    {"TIMESTAMP,ContextTokens\n", "column GeneratedTokens"},
    {HEADER "2023-11-16 18:15:46,1\n", ":2: 2 fields, but column 3"},
    {HEADER "2023-11-16 18:15:46,1,2\n2023-11-16,1,2\n", ":3: TIMESTAMP \"2023-11-16\""},
    {HEADER "2023-13-16 18:15:46,1,2\n", "TIMESTAMP"},
    {HEADER "2023-11-16 18:15:46.1x,1,2\n", "TIMESTAMP"},
    {HEADER "2023-11-16 18:15:46+1:00,1,2\n", "TIMESTAMP"},
    {HEADER "2023-11-16 24:15:46,1,2\n", "TIMESTAMP"},
    {HEADER "2023-11-16 18:15:46,-1,2\n", "ContextTokens \"-1\""},
    {HEADER "2023-11-16 18:15:46,1.5,2\n", "ContextTokens \"1.5\""},
    {HEADER "2023-11-16 18:15:46,16777217,2\n", "is not a number from 0 to 16777216"},
    {HEADER "2023-11-16 18:15:46,99999999999999999999999,2\n", "ContextTokens"},
    {HEADER "2023-11-16 18:15:46,1,\n", "GeneratedTokens \"\""},
    {HEADER "2023-11-16 18:15:46,1,0x10\n", "GeneratedTokens \"0x10\""},
    {HEADER, "holds no request"},
    {"", "holds no request"},
    {"\n\n\n", "holds no request"},
    {"{\n", ":1: not a JSON object"},
    {"{\"timestamp\": 0}\n", "input_length is missing"},
    {"{\"timestamp\": \"0\", \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []}\n",
     "timestamp is not a number"},
    {"{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []}\n",
     "timestamp -1 is not in 0"},
    {"{\"timestamp\": 1e400, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []}\n",
     "timestamp inf is not in 0"},
    {"{\"timestamp\": 0, \"input_length\": 1.5, \"output_length\": 1, \"hash_ids\": []}\n",
     "input_length 1.5 is not a whole number"},
    {"{\"timestamp\": 0, \"input_length\": 1e9, \"output_length\": 1, \"hash_ids\": []}\n",
     "input_length 1e+09 is not in 0 to 16777216"},
    {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": null, \"hash_ids\": []}\n",
     "output_length is not a number"},
    {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1}\n", "hash_ids is missing"},
    {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": 5}\n",
     "hash_ids is not a list"},
    {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1, -2]}\n",
     "hash_ids holds something that is no id"},
    {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [4294967296]}\n",
     "hash_ids holds something that is no id"},
    {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []} x\n",
     "not a JSON object"},
    {"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []}\n[1]\n",
     ":2: not a JSON object"},
};
enum { NUM_BAD = sizeof(BAD) / sizeof(BAD[0]) };

START_TEST(a_bad_line_is_refused_with_its_number) {
    ATTND_CK_ERR(read_text(BAD[_i].text), ATTND_EINVAL);
    ck_assert_msg(strstr(info.text, BAD[_i].says) != NULL, "says: %s", info.text);
    ck_assert_str_eq(info.field, "trace");
}
END_TEST

START_TEST(a_nul_byte_is_refused) {
    const char text[] = HEADER "2023-11-16 18:15:46,1\0,2\n";
    ATTND_CK_ERR(read_bytes(text, sizeof(text) - 1, 0), ATTND_EINVAL);
    ck_assert_ptr_nonnull(strstr(info.text, ":2: NUL byte"));
}
END_TEST

START_TEST(a_line_past_the_limit_is_refused) {
    size_t bytes = BENCH_TRACE_LINE_BYTES + 2;
    char *text = malloc(bytes);
    memset(text, '{', bytes);
    ATTND_CK_ERR(read_bytes(text, bytes, 0), ATTND_EINVAL);
    ck_assert_ptr_nonnull(strstr(info.text, ":1: line is longer than 1048576 bytes"));
    free(text);
}
END_TEST

START_TEST(deep_json_is_refused) {
    size_t depth = 100000;
    char *text = malloc(depth + 20);
    strcpy(text, "{\"hash_ids\": ");
    memset(text + strlen(text), '[', depth);
    text[12 + depth] = '\0';
    ATTND_CK_ERR(read_text(text), ATTND_EINVAL);
    free(text);
}
END_TEST

START_TEST(every_prefix_of_a_file_is_read_or_refused) {
    const char csv[] = HEADER "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47,3,4\n";
    const char json[] =
        "{\"timestamp\": 3000, \"input_length\": 6, \"output_length\": 5, \"hash_ids\": [0, 1]}\n";
    for (size_t n = 0; n < sizeof(csv); n++) {
        attnd_err err = read_bytes(csv, n, 0);
        ck_assert(err == ATTND_OK || err == ATTND_EINVAL);
        bench_trace_free(&trace);
    }
    for (size_t n = 0; n < sizeof(json); n++) {
        attnd_err err = read_bytes(json, n, 0);
        ck_assert(err == ATTND_OK || err == ATTND_EINVAL);
        bench_trace_free(&trace);
    }
}
END_TEST

START_TEST(a_file_that_is_not_there_is_said) {
    ATTND_CK_ERR(bench_trace_read(&trace, "/nowhere/trace.csv", 0, &info), ATTND_EIO);
    ck_assert_ptr_nonnull(strstr(info.text, "/nowhere/trace.csv: No such file"));
    ATTND_CK_ERR(bench_trace_read(&trace, "/", 0, &info), ATTND_EIO);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_trace");
    TCase *tc = tcase_create("reader");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, azure_csv_is_read_as_published);
    tcase_add_test(tc, columns_zones_and_line_ends_may_vary);
    tcase_add_test(tc, mooncake_json_lines_are_read_as_published);
    tcase_add_test(tc, only_the_first_rows_are_read);
    tcase_add_loop_test(tc, a_bad_line_is_refused_with_its_number, 0, NUM_BAD);
    tcase_add_test(tc, a_nul_byte_is_refused);
    tcase_add_test(tc, a_line_past_the_limit_is_refused);
    tcase_add_test(tc, deep_json_is_refused);
    tcase_add_test(tc, every_prefix_of_a_file_is_read_or_refused);
    tcase_add_test(tc, a_file_that_is_not_there_is_said);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
